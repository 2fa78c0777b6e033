// A job as its ranks' sessions see it: on this node (Job), or on another one, whose daemon
// coordinates it (daemon/peer). What takes a journey there is answered by a callback; a job of this
// node calls it at once.

#ifndef DAEMON_JOB_JOB_PORT_H_
#define DAEMON_JOB_JOB_PORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "daemon/job/job_key.h"
#include "daemon/job/layout_channel.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/membership.h"
#include "daemon/job/operation_channel.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

// What the ranks must agree on at join.
struct JobOptions {
  bool divide_by_world = false;
  std::uint64_t step_timeout_ns = 0;
  NcclSettings nccl;
};

// Thread-safe.
class JobPort {
 public:
  virtual ~JobPort() = default;

  virtual const std::string& job_id() const = 0;
  // Where the daemon is that coordinates it; empty: it is this one.
  virtual std::string coordinator() const { return ""; }

  struct Registration {
    std::uint32_t channel = 0;
    LayoutPlan plan;
  };
  using Registered = std::function<void(absl::StatusOr<Registration>)>;
  // INVALID_ARGUMENT, FAILED_PRECONDITION LAYOUT_MISMATCH, ALREADY_REGISTERED or RANKS_LEFT,
  // RESOURCE_EXHAUSTED: the request is refused, the session lives. A rank that comes late to an
  // agreement that has failed gets the same failure, once. `answer` is called once, before any
  // message about the layout; not at all if the session ends first.
  virtual void RegisterLayout(std::uint32_t rank, LayoutRequest request, Registered answer) = 0;

  // What the rank was given for this channel; let go of, on an executor, once the layout is
  // replaced, its agreement has failed, the rank has exited or the job is over.
  virtual void Hold(std::uint32_t rank, std::uint32_t channel, std::shared_ptr<void> memory) = 0;

  // This rank agreed, but has no memory for it: the layout fails on every rank, now rather than at
  // its deadline.
  virtual void RefuseLayout(std::uint32_t rank, std::uint32_t channel, const absl::Status& why) = 0;

  // For all calls below: a Status that is not OK is a breach of the protocol by `rank`, whose
  // session must be ended with it (Lose). A call of a rank whose session the job has ended already
  // is ignored. A job on another node ends the session itself, later.
  // That RegisterLayout may name `channel` as the one to be replaced.
  virtual absl::Status CheckReplaces(std::uint32_t rank, std::uint32_t channel) const = 0;
  virtual absl::Status ArenaMapped(std::uint32_t rank, std::uint32_t channel,
                                   RankMemory memory) = 0;
  virtual absl::Status MarkReady(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                                 absl::Span<const std::uint32_t> buckets) = 0;
  virtual absl::Status EndStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                               absl::string_view used_map) = 0;
  // MarkReady of every bucket that the rank has not marked, and EndStep.
  virtual absl::Status FinishStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                                  absl::string_view used_map) = 0;
  virtual absl::Status AbandonStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                                   absl::string_view reason) = 0;
  virtual absl::Status Operate(std::uint32_t rank, std::uint64_t sequence,
                               const OperationSpec& spec, StagingMemory staging,
                               std::uint64_t deadline_ns) = 0;
  virtual absl::Status ChunkWritten(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk,
                                    std::uint64_t bytes) = 0;
  virtual absl::Status ChunkRead(std::uint32_t rank, std::uint64_t sequence,
                                 std::uint64_t chunk) = 0;
  virtual absl::Status Leave(std::uint32_t rank, bool exit) = 0;

  // Who is waited for in a running step; "" if it is not running. Not answered if the session ends
  // first.
  virtual void AskMissing(std::uint32_t channel, std::uint64_t step,
                          std::function<void(std::string)> answer) = 0;

  // The session of `rank` is gone or must go; `why` becomes its own end ("its process ended", a
  // breach, ...). Unless the rank had exited, the job fails: every running step is void and every
  // other session ends ABORTED RANK_LOST.
  virtual void Lose(std::uint32_t rank, std::uint64_t incarnation, const absl::Status& why) = 0;

  virtual RankState StateOf(std::uint32_t rank) const = 0;
};

// A rank that wants to join.
struct JoinRequest {
  JobKey key;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  JobOptions options;
  std::uint64_t incarnation = 0;  // of its session, on its node
  std::string coordinator;        // where rank 0's daemon is; empty: here
  std::string client;
};

struct Joined {
  std::shared_ptr<JobPort> job;
  std::uint64_t generation = 0;
};

// Thread-safe.
class JobFinder {
 public:
  virtual ~JobFinder() = default;
  // Finds the rank's job and joins it. `joined` is called once, perhaps before this returns;
  // messages to `sink` may come before it. Statuses as JobTable::Join; UNAVAILABLE
  // COORDINATOR_UNREACHABLE.
  virtual void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
                    std::function<void(absl::StatusOr<Joined>)> joined) = 0;
};

}  // namespace gradsync

#endif  // DAEMON_JOB_JOB_PORT_H_
