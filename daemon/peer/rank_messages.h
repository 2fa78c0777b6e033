// Checks and conversions for the messages of a rank that travel between nodes.

#ifndef DAEMON_PEER_RANK_MESSAGES_H_
#define DAEMON_PEER_RANK_MESSAGES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/operation_channel.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync::daemon {

// A status that another node sent, within bounds: a known code, 4 KiB of text, one small detail.
absl::Status StatusFromPeer(const google::rpc::Status& proto);

// The client's message for an operation. A deadline that has passed becomes a timeout of 1 ms.
void EncodeOperation(std::uint64_t sequence, const OperationSpec& spec, std::uint64_t deadline_ns,
                     std::uint64_t now_ns, v1::SessionRequest* message);

// Whether this node's plan of a layout has the same buckets as the coordinator's.
bool SameBuckets(const LayoutPlan& plan, const v1::LayoutAssigned& assigned);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_RANK_MESSAGES_H_
