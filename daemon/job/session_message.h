// The messages of a job to its sessions. Plain values: daemon/rpc encodes them, tests read them.

#ifndef DAEMON_JOB_SESSION_MESSAGE_H_
#define DAEMON_JOB_SESSION_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "daemon/reduce/gradient_stats.h"
#include "daemon/telemetry/step_timeline.h"

namespace gradsync::v1 {
class SessionResponse;
}

namespace gradsync::daemon {

// How a step ended; the same object for every rank.
struct StepRecord {
  StepTimes times;       // of the step's commit, and of each bucket's marks, start and finish
  absl::Status verdict;  // OK: complete. STEP_IN_DOUBT: in doubt. Otherwise void, and why.
  std::string used_map;  // UsedMap::Union(); empty if the step is not complete
  std::uint32_t live_ranks = 0;
  std::uint32_t divisor = 0;
  std::vector<GradientStats> stats;  // one per bucket; empty if the step is not complete
};

struct LayoutReadyMessage {
  std::uint32_t channel;
  std::uint64_t fingerprint;
  std::uint64_t first_step;
};
struct LayoutFailedMessage {
  std::uint64_t request_id;
  absl::Status status;
};
struct BucketDoneMessage {
  std::uint32_t channel;
  std::uint64_t step;
  std::uint32_t bucket;
  std::uint64_t start_ns;
  std::uint64_t finish_ns;
};
struct StepDoneMessage {
  std::uint32_t channel;
  std::shared_ptr<const StepRecord> record;
};
// To a receiver: the chunk is in its staging memory. To the root (`write`): it may write this
// chunk, because every receiver has read the previous one.
struct ChunkReadyMessage {
  std::uint64_t sequence;
  std::uint64_t chunk;
  std::uint64_t bytes;
  bool write;
};
struct OperationDoneMessage {
  std::uint64_t sequence;
};
struct OperationFailedMessage {
  std::uint64_t sequence;
  absl::Status status;
};
// Every rank has left: those that stayed take part again, from these numbers on.
struct LeaveDoneMessage {
  struct NextStep {
    std::uint32_t channel;
    std::uint64_t step;
  };
  std::uint32_t last_to_leave;
  std::uint64_t next_sequence;  // of the job's own channel
  std::vector<NextStep> next_steps;
};
// The rank came back after a loss and takes part in operations again.
struct HealedMessage {
  std::uint64_t next_sequence;  // of the job's own channel
};
// ---- The state of the model, from one rank to another: see StateHealing. Each but
// StateFailedMessage names its transfer.
// To a rank that has the state: asks for its digests. `offer`: the rank is also the source.
struct StateQuestionMessage {
  std::uint64_t transfer;
  bool offer;
};
// To the replacement.
struct StateBeginMessage {
  std::uint64_t transfer;
  std::uint64_t bytes;
  std::uint32_t source;
};
// To the source (`write`): it writes this chunk to its staging memory. To the replacement: it reads
// the chunk.
struct StateChunkMessage {
  std::uint64_t transfer;
  std::uint64_t chunk;
  std::uint64_t bytes;
  bool write;
};
struct StateAdmittedMessage {
  std::uint64_t transfer;
};
struct StateCancelledMessage {
  std::uint64_t transfer;
};
// To the replacement: its request has failed.
struct StateFailedMessage {
  absl::Status status;
};

// The last message of a session. OK after Leave{exit} and Finish.
struct SessionEndMessage {
  absl::Status status;
};

// For people, to a rank that waits: what it waits for, and what each late rank has not done.
struct StillWaitingMessage {
  std::string text;
};

// Asks the trainer to answer, which shows that its process runs. The session's lease sends it, not
// the job.
struct LeaseQuestionMessage {
  std::uint64_t number;
};

// A message of a job that another node coordinates, as that node sent it.
struct ForwardedMessage {
  std::shared_ptr<const v1::SessionResponse> response;
  std::size_t bytes = 0;  // in memory; this can be many times the bytes on the wire
};

using SessionMessage =
    std::variant<LayoutReadyMessage, LayoutFailedMessage, BucketDoneMessage, StepDoneMessage,
                 ChunkReadyMessage, OperationDoneMessage, OperationFailedMessage, LeaveDoneMessage,
                 HealedMessage, StateQuestionMessage, StateBeginMessage, StateChunkMessage,
                 StateAdmittedMessage, StateCancelledMessage, StateFailedMessage, SessionEndMessage,
                 StillWaitingMessage, LeaseQuestionMessage, ForwardedMessage>;

// Takes a job's messages for one session. Thread-safe. Shared by the job and the session. Drops
// messages that come after the session's end.
class SessionSink {
 public:
  virtual ~SessionSink() = default;
  // Queues the message. Never blocks, and never calls back. Called under the job's lock, so the
  // order of messages is fixed.
  virtual void Queue(SessionMessage message) = 0;
  // Sends what is queued. Called without any lock.
  virtual void Flush() = 0;
  // True once the session's end is queued, or the trainer's stream has ended. Then a rank that
  // waits to join gives up.
  virtual bool IsAbandoned() const { return false; }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_SESSION_MESSAGE_H_
