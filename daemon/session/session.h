// One trainer's live connection: a rank of a job, its memory and its lease.
//
// A session ends once, for one of: Leave{exit}, the end of its stream, the end of its process, its
// lease, a breach of the protocol, or its job's end. All but the first are the rank's loss to the
// job.
//
// Thread-safe. Its memory is created by the RPC thread, handed out by the side socket's thread,
// mapped and freed on the executor's. Lock order: Session::mutex_ is a leaf: no other lock is taken
// under it.

#ifndef DAEMON_SESSION_SESSION_H_
#define DAEMON_SESSION_SESSION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/host_arena.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job_port.h"
#include "daemon/session/peer_process.h"
#include "daemon/worker/gpu_arena.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync {

// What a session was opened with; constant.
struct SessionIdentity {
  PeerProcess peer;
  std::uint64_t incarnation = 0;
  std::uint32_t rank = 0;
  std::string client;
  std::uint64_t opened_ns = 0;
  std::uint64_t generation = 1;  // of its job
  std::string job_key;           // names the job's workers, over its generations
};

struct SessionLimits {
  std::uint64_t lease_ns = 0;
  std::size_t layouts = 0;
};

// Where layouts on GPUs get their memory, and what it counts against; both outlive the sessions.
struct GpuMemory {
  WorkerSupervisor* workers = nullptr;  // null: there are no layouts on GPUs
  ArenaQuota* quota = nullptr;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(SessionIdentity identity, const SessionLimits& limits, std::shared_ptr<JobPort> job,
          std::shared_ptr<SessionSink> sink, std::shared_ptr<HostArena> staging,
          ArenaQuota::Reservation staging_reservation, ArenaQuota* quota, Executor* executor,
          const GpuMemory& gpus);

  const SessionIdentity& identity() const { return identity_; }
  std::uint32_t rank() const { return identity_.rank; }
  JobPort& job() const { return *job_; }
  const std::shared_ptr<HostArena>& staging() const { return staging_; }

  struct LayoutMemory {
    std::shared_ptr<HostArena> arena;
    std::shared_ptr<SemaphorePage> semaphores;
    std::shared_ptr<GpuArena> gpu;  // instead of `arena`
    bool mps = false;               // LayoutRequest::mps
  };
  struct Registration {
    std::uint32_t channel = 0;
    LayoutPlan plan;
    LayoutMemory memory;
  };
  // Agrees on the layout and creates its memory, which the job lets go of. The session lives on if
  // this fails. `registered` is called once, perhaps before this returns, or not at all if the
  // session ends first.
  using Registered = std::function<void(absl::StatusOr<Registration>)>;
  void RegisterLayout(LayoutRequest request, Registered registered);

  // The client says that it has populated the arena: checked, mapped and told to the job on the
  // executor. A failure there ends the session.
  absl::Status ArenaMapped(std::uint32_t channel);
  // Checks again that the arena is whole (a client may punch holes into it, which the daemon would
  // fill at its own expense), then Job::MarkReady.
  absl::Status MarkReady(std::uint32_t channel, std::uint64_t step,
                         absl::Span<const std::uint32_t> buckets);
  // Checks again that the arena is whole (a client may punch holes into it), then EndStep.
  absl::Status EndStep(std::uint32_t channel, std::uint64_t step, absl::string_view used_map);
  // The same, then Job::FinishStep.
  absl::Status FinishStep(std::uint32_t channel, std::uint64_t step, absl::string_view used_map);
  // The staging window, mapped; FAILED_PRECONDITION unless its first `bytes` bytes are populated.
  absl::StatusOr<StagingMemory> Staging(std::uint64_t bytes);

  // A message has come: the process runs.
  void Heard(std::uint64_t now_ns) { heard_ns_.store(now_ns, std::memory_order_relaxed); }
  // A worker has died: the session ends if its memory was there.
  void WorkerLost(const WorkerKey& key, const absl::Status& why);

  // Asks after a third of the lease's silence; ends the session after all of it: then
  // true, once.
  bool CheckLease(std::uint64_t now_ns);
  // It has had memory on one.
  bool on_gpu() const { return on_gpu_.load(std::memory_order_relaxed); }

  // Ends the session with `why`, which others read after "known because". Idempotent.
  void End(const absl::Status& why);

  // In host memory; on GPUs.
  std::uint64_t memory_bytes() const;
  std::uint64_t gpu_bytes() const;
  // Of its layouts on GPUs.
  struct GpuUse {
    std::string device;
    bool mps = false;  // its process shares that GPU through MPS
  };
  std::vector<GpuUse> gpu_uses() const;

 private:
  // Held by the job, which knows when the layout ends.
  struct Layout {
    LayoutMemory memory;
    ArenaQuota::Reservation reservation;
    std::atomic<bool> mapping{false};
  };

  // Null: the layout is closed, or was never this session's.
  std::shared_ptr<Layout> Find(std::uint32_t channel) const;
  absl::Status CheckWhole(std::uint32_t channel, std::uint64_t step) const;
  // Gives the rank its memory of what it agreed to, on the place's device or, if that is empty, the
  // host.
  struct Place {
    std::string name;
    std::string device;
    bool mps = false;
  };
  void Furnish(const Place& place, JobPort::Registration agreed, const Registered& registered);
  void Furnished(JobPort::Registration agreed, absl::StatusOr<std::shared_ptr<Layout>> layout,
                 const Registered& registered);
  // Without an arena, for which `arena_bytes` of host memory are reserved.
  absl::StatusOr<std::shared_ptr<Layout>> NewLayout(const LayoutPlan& plan,
                                                    std::uint64_t arena_bytes);
  // What is held for the rank, that it has not lost yet.
  std::vector<std::shared_ptr<Layout>> Layouts() const;

  const SessionIdentity identity_;
  const SessionLimits limits_;
  const std::shared_ptr<JobPort> job_;
  const std::shared_ptr<SessionSink> sink_;
  const std::shared_ptr<HostArena> staging_;
  const ArenaQuota::Reservation staging_reservation_;
  ArenaQuota* const quota_;
  Executor* const executor_;
  const GpuMemory gpus_;

  std::atomic<std::uint64_t> heard_ns_;
  std::atomic<std::uint64_t> asked_ns_{0};
  std::atomic<bool> expired_{false};  // its lease
  std::atomic<bool> on_gpu_{false};

  mutable Mutex mutex_;
  // By channel; those that are closed go with the next registration.
  std::map<std::uint32_t, std::weak_ptr<Layout>> layouts_ ABSL_GUARDED_BY(mutex_);
  std::uint32_t last_channel_ ABSL_GUARDED_BY(mutex_) = 0;
  bool staging_mapped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync

#endif  // DAEMON_SESSION_SESSION_H_
