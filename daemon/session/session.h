// The session of one trainer: a rank of a job, with its memory and its lease.
//
// A session ends once: by Leave{exit} or Finish, at the end of its stream, of its process, of its
// lease or of its job, or because of a bad request. If it ends by Leave{exit}, by Finish or with
// its job, the rank is not lost. Otherwise it is.
//
// Thread-safe. RPC threads and the job's executor create its memory, the side socket's thread hands
// it out, and the session's executor checks it. Session::mutex_ is a leaf: no lock is taken under
// it.

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
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/host_arena.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/base/mutex.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_port.h"
#include "daemon/job/rank_session.h"
#include "daemon/session/client_process.h"
#include "daemon/session/descriptor_quota.h"
#include "daemon/worker/gpu_arena.h"
#include "daemon/worker/worker_supervisor.h"

namespace gradsync::daemon {

// Identifies a session. Constant.
struct SessionIdentity {
  ClientProcess process;
  std::uint64_t incarnation = 0;
  std::uint32_t rank = 0;
  std::string client;
  std::uint64_t opened_ns = 0;
  std::uint64_t generation = 1;  // of its job
  std::string job_key;           // of the job, the same in all of its generations
  bool hold = false;             // the job's policy is `hold`

  RankSession session() const { return {rank, incarnation}; }
};

struct SessionLimits {
  std::uint64_t lease_ns = 0;
  std::size_t layouts = 0;
  DescriptorQuota* descriptors = nullptr;  // null: not bounded
  // The most bytes of an arena that one turn maps or unmaps. Other values are for tests.
  std::size_t turn_bytes = HostArena::kTurnBytes;
};

// The source of GPU memory, and the quota that it counts against. Both outlive the sessions.
struct GpuMemory {
  WorkerSupervisor* workers = nullptr;  // null: layouts on GPUs are refused
  ArenaQuota* quota = nullptr;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(SessionIdentity identity, const SessionLimits& limits, std::shared_ptr<JobPort> job,
          std::shared_ptr<SessionSink> sink, std::shared_ptr<HostArena> staging, ArenaQuota* quota,
          UserExecutor* executor, const GpuMemory& gpus);

  const SessionIdentity& identity() const { return identity_; }
  std::uint32_t rank() const { return identity_.rank; }
  JobPort& job() const { return *job_; }
  const std::shared_ptr<HostArena>& staging() const { return staging_; }

  struct LayoutMemory {
    std::shared_ptr<HostArena> arena;
    std::shared_ptr<SemaphorePage> semaphores;
    std::shared_ptr<GpuArena> gpu;  // set instead of `arena` for a layout on a GPU
    bool mps = false;               // LayoutRequest::mps
  };
  struct Registration {
    std::uint32_t channel = 0;
    LayoutPlan plan;
    LayoutMemory memory;
  };
  // Agrees on the layout with the job and creates its memory, which the job holds. The session goes
  // on if this fails. Calls `registered` once, perhaps before this returns, or never if the session
  // ends first.
  using Registered = std::function<void(absl::StatusOr<Registration>)>;
  void RegisterLayout(LayoutRequest request, Registered registered);

  // The client has populated and sealed the arena. The executor checks that, maps the arena in
  // turns, and calls the job. A failure there ends the session. If the layout ends first, nothing
  // more happens. FAILED_PRECONDITION: the channel has no arena, or this is the second call for it.
  absl::Status ArenaMapped(std::uint32_t channel);
  // Returns the staging memory, mapped. FAILED_PRECONDITION: it is not populated.
  absl::StatusOr<StagingMemory> Staging();

  // Notes that a message has come, which shows that the process runs.
  void Heard(std::uint64_t now_ns) { heard_ns_.store(now_ns, std::memory_order_relaxed); }
  // A worker was lost: ends the session if the worker held its memory.
  void WorkerLost(const WorkerKey& key, const absl::Status& why);

  // After a third of the lease without a message, asks the client whether it lives. After the whole
  // lease, says once why the session must end. Otherwise OK.
  absl::Status CheckLease(std::uint64_t now_ns);
  // True if the session ever had memory on a GPU.
  bool on_gpu() const { return on_gpu_.load(std::memory_order_relaxed); }

  // Tells the client that the session has ended. The job does not hear of it.
  void TellEnd(const absl::Status& why);
  // Ends the session. `why` completes the other ranks' error after "known because". Idempotent.
  void End(const absl::Status& why);

  // Bytes that it holds in host memory and on GPUs.
  std::uint64_t memory_bytes() const;
  std::uint64_t gpu_bytes() const;
  // The GPUs of its layouts.
  struct GpuUse {
    std::string device;
    bool mps = false;  // its process uses that GPU through MPS
  };
  std::vector<GpuUse> gpu_uses() const;

 private:
  // What a layout takes of the user's quotas.
  struct Charge {
    ArenaQuota::Reservation reservation;
    std::shared_ptr<void> descriptors;
  };
  // The job holds it, and frees it when the layout ends.
  struct Layout {
    // Given back when the memory is free: its arena has a reference, too.
    std::shared_ptr<Charge> charge;
    LayoutMemory memory;
    std::atomic<bool> mapping{false};
  };

  // Runs `work` after two things: the user's ended sessions are freed, and the job has dropped its
  // references to the memory that it has released so far. That memory may still be mapped, but the
  // turns that unmap it are queued.
  void AfterReleases(std::function<void()> work);
  // Queues the next turn of ArenaMapped().
  void MapLater(std::uint32_t channel, const std::shared_ptr<Layout>& layout);
  // One such turn. After the last one, the job gets the memory.
  void MapNext(std::uint32_t channel, const std::shared_ptr<Layout>& layout);
  // Null: the layout has ended, or was never this session's.
  std::shared_ptr<Layout> Find(std::uint32_t channel) const;
  // Where the memory of a layout goes.
  struct Place {
    std::string name;
    std::string device;
    bool mps = false;
    bool counts = true;  // false: it takes the place of a layout that counts
  };
  // Creates the memory of an agreed layout, on the place's device, or in host memory if the device
  // is empty.
  void AllocateMemory(const Place& place, JobPort::Registration agreed,
                      absl::StatusOr<std::shared_ptr<Layout>> layout, const Registered& registered);
  void MemoryAllocated(JobPort::Registration agreed, absl::StatusOr<std::shared_ptr<Layout>> layout,
                       const Registered& registered);
  // Makes a layout without an arena, and reserves host memory for one if it belongs there.
  // RESOURCE_EXHAUSTED QUOTA.
  absl::StatusOr<std::shared_ptr<Layout>> NewLayout(const Place& place, const LayoutPlan& plan);
  // The rank's layouts that have not ended.
  std::vector<std::shared_ptr<Layout>> Layouts() const;

  const SessionIdentity identity_;
  const SessionLimits limits_;
  const std::shared_ptr<JobPort> job_;
  const std::shared_ptr<SessionSink> sink_;
  const std::shared_ptr<HostArena> staging_;
  ArenaQuota* const quota_;
  UserExecutor* const executor_;
  const GpuMemory gpus_;

  std::atomic<std::uint64_t> heard_ns_;
  std::atomic<std::uint64_t> asked_ns_{0};
  std::atomic<bool> expired_{false};  // CheckLease() has said so
  std::atomic<bool> on_gpu_{false};

  mutable Mutex mutex_;
  // By channel. The next registration erases those that have ended.
  std::map<std::uint32_t, std::weak_ptr<Layout>> layouts_ ABSL_GUARDED_BY(mutex_);
  std::uint32_t last_channel_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_SESSION_H_
