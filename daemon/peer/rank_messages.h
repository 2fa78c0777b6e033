// A rank's messages between nodes: what its session decoded, on the wire once more, and the answers
// back.

#ifndef DAEMON_PEER_RANK_MESSAGES_H_
#define DAEMON_PEER_RANK_MESSAGES_H_

#include <cstdint>
#include <optional>

#include "daemon/job/job_port.h"
#include "daemon/job/session_message.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync {

// What a peer says is bounded: a code that there is, 4 KiB of text, one small detail.
absl::Status StatusFromPeer(const google::rpc::Status& proto);

// Without the token.
void EncodeOpen(const JoinRequest& request, v1::OpenSession* open);
void EncodeRegister(const LayoutRequest& request, std::uint64_t now_ns,
                    v1::RegisterLayout* message);
void EncodeOperation(std::uint64_t sequence, const OperationSpec& spec, std::uint64_t deadline_ns,
                     std::uint64_t now_ns, v1::SessionRequest* message);

// What a job said, as Encode() of daemon/rpc wrote it; nullopt for other messages.
std::optional<SessionMessage> DecodeSessionMessage(const v1::SessionResponse& response);

// Both daemons cut the layout alike.
bool SameBuckets(const LayoutPlan& plan, const v1::LayoutAssigned& assigned);

}  // namespace gradsync

#endif  // DAEMON_PEER_RANK_MESSAGES_H_
