// The node's workers: one for each job on each GPU.

#ifndef DAEMON_WORKER_WORKER_SUPERVISOR_H_
#define DAEMON_WORKER_WORKER_SUPERVISOR_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/worker/restart_policy.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_process.h"

namespace gradsync {

struct WorkerSupervisorOptions {
  WorkerProcessOptions process;
  std::string cuda_library = "libcuda.so.1";  // as dlopen takes them
  std::string nccl_library = "libnccl.so.2";
  std::string nvml_library = "libnvidia-ml.so.1";
  // MPS, where it is on, serves several users at a time. Else trainers of another user than the
  // daemon's are refused there.
  bool mps_multiuser = false;
  // A bucket that has been on a GPU for so long hangs. All ranks of all nodes are ready by then.
  absl::Duration operation_limit = absl::Minutes(2);
  // How long a worker without an arena is kept for the trainers that come next.
  std::uint64_t idle_limit_ns = 60'000'000'000;
  // How often a worker is asked whether its GPU still works, whatever it does: between two steps
  // nothing else would tell. One that does not answer is killed after process.hang_limit.
  std::uint64_t check_interval_ns = 5'000'000'000;
  // Processes that start at a time: more than a node has GPUs, or MIG instances (7 each on 8), so
  // that only layouts on GPUs that are not there are refused.
  std::size_t max_starting = 64;
};

struct WorkerKey {
  std::string job;     // as the log names it
  std::string device;  // UUID
  // Of the job, for status.
  uid_t uid = 0;
  std::string job_id = {};
  // Of the daemon that calls it, as this one reaches it; empty: this one. Jobs of the same name
  // that meet elsewhere share no worker.
  std::string coordinator = {};

  bool operator<(const WorkerKey& other) const {
    return std::tie(job, device, coordinator) <
           std::tie(other.job, other.device, other.coordinator);
  }
};

// For status.
struct WorkerStatus {
  WorkerKey key;
  pid_t pid = 0;      // 0: it is not running
  bool open = false;  // its GPU is; then the next two are known
  worker::Started started;
  worker::Pong memory;  // as reported last
  std::uint32_t restarts = 0;
  std::string last_failure;
};

// A worker is started when it is first asked for, and lives until nobody has needed it for a while:
// a job's trainers come and go, and its communicators are dear. If it dies it is started again when
// it is asked for the next time, as RestartPolicy allows.
//
// Thread-safe. Callbacks come on the workers' threads, or from within Ensure; none once this is
// gone, which stops every worker.
class WorkerSupervisor : public std::enable_shared_from_this<WorkerSupervisor> {
 public:
  // The process may be let go of on any thread.
  using Ready = std::function<void(absl::StatusOr<std::shared_ptr<WorkerProcess>>)>;
  using Lost = std::function<void(const WorkerKey&, const absl::Status&)>;

  // `lost` is told of every worker that has died after it was ready. The executor, which outlives
  // this and the processes, destroys processes: that waits for their end.
  static std::shared_ptr<WorkerSupervisor> Make(WorkerSupervisorOptions options, Lost lost,
                                                const Clock* clock, Executor* executor);
  ~WorkerSupervisor();
  WorkerSupervisor(const WorkerSupervisor&) = delete;
  WorkerSupervisor& operator=(const WorkerSupervisor&) = delete;

  // `ready` once: with the worker, whose GPU is open, or with why there is none: the statuses of
  // FindCudaDevice, CheckCudaDeviceUsable, CheckMpsUsers, CudaDriver::Open and StatusOfInit,
  // WORKER_LOST, WORKER_RESTARTING; RESOURCE_EXHAUSTED WORKERS_STARTING: max_starting.
  void Ensure(const WorkerKey& key, const Ready& ready);

  // Stops what has been idle for too long, and has the others look at their GPUs. True if there are
  // others.
  bool Tick();

  // Ends every process. When this returns, what was called has been answered, nothing more is, and
  // no callback runs.
  void Shutdown();

  // Looks what a worker finds on this node: driver, NCCL, GPUs. Asks a process that ends with it.
  // Once; `found` is not called if Shutdown comes first.
  void Probe(std::function<void(absl::StatusOr<worker::Started>)> found);
  // What Probe has found. UNAVAILABLE: it has not looked yet.
  absl::StatusOr<worker::Started> Found() const;

  // Those that there are. They are asked what memory they have, and waited for for so long at most:
  // one that is busy is described as it was before.
  std::vector<WorkerStatus> Workers(absl::Duration patience = absl::ZeroDuration());

 private:
  struct Worker {
    std::shared_ptr<WorkerProcess> process;  // null: not running
    std::uint64_t incarnation = 0;           // of the process: a late end is known by it
    bool open = false;                       // Start has been replied to
    worker::Started started;
    // For Start's reply, or for the end of a process that has one, to start another.
    std::vector<Ready> waiting;
    RestartPolicy policy;
    std::uint32_t restarts = 0;
    std::uint64_t idle_since_ns = 0;  // 0: somebody has its process, or waits for it
    std::uint64_t checked_ns = 0;     // when it was last asked about its GPU, or opened it
  };

  WorkerSupervisor(WorkerSupervisorOptions options, Lost lost, const Clock* clock,
                   Executor* executor);

  // Null: it has never been.
  absl::Status MayStartLocked(const Worker* worker) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StartLocked(const WorkerKey& key, Worker* worker)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  worker::Call StartCall(const WorkerKey& key) const;
  void OnStarted(const WorkerKey& key, std::uint64_t incarnation,
                 absl::StatusOr<WorkerProcess::Reply> reply);
  void OnEnded(const WorkerKey& key, std::uint64_t incarnation, const absl::Status& why);
  // Has it look at its GPU, and at its memory if asked to: if it has failed, it ends. `answered`
  // comes on its thread, or from within; no reference to the process is taken, by which it would
  // not be idle.
  static void PingLocked(Worker* worker, bool memory, WorkerPort::Answered answered);
  void KeepFound(const absl::StatusOr<worker::Started>& found);
  void AskMemory(absl::Duration patience);
  // The worker, unless it is another incarnation by now.
  Worker* FindLocked(const WorkerKey& key, std::uint64_t incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Around a callback on a worker's thread: false, and it must not be called, after Shutdown.
  bool BeginTelling();
  void EndTelling();
  void LetProbeGo();
  // Of one that is in the table no more: stops it, and tells those that wait for it.
  void GiveUp(Worker* worker);
  // Destroyed on the executor, whoever lets go of it last: perhaps its own thread.
  std::shared_ptr<WorkerProcess> Share(std::unique_ptr<WorkerProcess> process) const;

  const WorkerSupervisorOptions options_;
  const Lost lost_;
  const Clock* const clock_;
  Executor* const executor_;

  mutable Mutex mutex_;
  std::map<WorkerKey, Worker> workers_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<WorkerProcess> probe_ ABSL_GUARDED_BY(mutex_);  // until it has replied
  int telling_ ABSL_GUARDED_BY(mutex_) = 0;                       // callbacks that run
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar told_;  // telling_ is 0
  absl::StatusOr<worker::Started> found_ ABSL_GUARDED_BY(mutex_) =
      absl::UnavailableError("a worker is looking for GPUs");
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_SUPERVISOR_H_
