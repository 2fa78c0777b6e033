// Decodes and validates each message of a rank after OpenSession, and calls the rank's job. Serves
// this node's trainers, and ranks whose messages another node forwards. Knows nothing of gRPC.

#ifndef DAEMON_RPC_RANK_DISPATCH_H_
#define DAEMON_RPC_RANK_DISPATCH_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/job/job_port.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/request_parts.h"
#include "gradsync/v1/gradsync.pb.h"

namespace gradsync::daemon {

// The parts of a rank that its messages need: its job, its memory, and the way back. Used by one
// thread at a time.
class RankPort {
 public:
  // `account` is charged for what requests make the daemon keep.
  explicit RankPort(const MemoryAccount& account = {}) : parts_(account) {}
  virtual ~RankPort() = default;

  virtual RankSession session() const = 0;
  virtual JobPort& job() const = 0;

  // For the calls below: a Status that is not OK ends the rank's session.

  virtual absl::Status ArenaMapped(std::uint32_t channel) = 0;
  virtual absl::StatusOr<StagingMemory> Staging() = 0;
  // Answers with LayoutAssigned, or by RefuseLayout().
  virtual absl::Status RegisterLayout(LayoutRequest request) = 0;

  virtual void Respond(v1::SessionResponse response) = 0;
  // Answers RegisterLayout. A refusal is an answer too: the session goes on.
  void RefuseLayout(std::uint64_t request_id, const absl::Status& why);

  RequestParts& parts() { return parts_; }

 private:
  RequestParts parts_;
};

// Takes every message of a rank except two: the callers handle OpenSession, and a LeaseAnswer never
// leaves the trainer's own daemon. A Status that is not OK ends the rank's session: the message
// breaks the protocol, or a quota or the kernel refuses what it needs.
absl::Status TakeRankRequest(const v1::SessionRequest& request, const DecodeLimits& limits,
                             std::uint64_t now_ns, RankPort* port);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_RANK_DISPATCH_H_
