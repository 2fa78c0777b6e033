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
  // A bucket that has been on a GPU for so long hangs. All ranks of all nodes are ready by then.
  absl::Duration operation_limit = absl::Minutes(2);
};

struct WorkerKey {
  std::string job;     // as the log names it
  std::string device;  // UUID

  bool operator<(const WorkerKey& other) const {
    return std::tie(job, device) < std::tie(other.job, other.device);
  }
};

// For status.
struct WorkerStatus {
  WorkerKey key;
  pid_t pid = 0;  // 0: it is not running
  worker::Started started;
  worker::Pong memory;  // as reported last
  std::uint32_t failures = 0;
  std::string last_failure;
};

// A worker is started when it is first asked for, and lives until its job lets go of it, also while
// the job's trainers come and go: its communicators are dear. If it dies it is started again when
// it is asked for the next time, as RestartPolicy allows.
//
// Thread-safe. Callbacks come on the workers' threads, or from within Ensure. The destructor stops
// every worker, with the executor's help; those who were given one let go of it before.
class WorkerSupervisor {
 public:
  using Ready = std::function<void(absl::StatusOr<std::shared_ptr<WorkerProcess>>)>;
  using Lost = std::function<void(const absl::Status&)>;

  // The executor, which outlives this, lets go of processes: that waits for their end.
  WorkerSupervisor(WorkerSupervisorOptions options, const Clock* clock, Executor* executor);
  ~WorkerSupervisor();
  WorkerSupervisor(const WorkerSupervisor&) = delete;
  WorkerSupervisor& operator=(const WorkerSupervisor&) = delete;

  // `ready` once: with the worker, whose GPU is open, or with why there is none: the statuses of
  // FindCudaDevice, CheckCudaDeviceUsable and CudaDriver::Open, WORKER_LOST, WORKER_RESTARTING.
  // `lost` once if it dies after that.
  void Ensure(const WorkerKey& key, const Ready& ready, const Lost& lost);

  // The job needs it no more: it is stopped, and `lost` is not called.
  void LetGo(const WorkerKey& key);

  // What a worker would find on this node: driver, NCCL, GPUs. Asks a process that ends with it;
  // one at a time.
  void Probe(std::function<void(absl::StatusOr<worker::Started>)> found);

  std::vector<WorkerStatus> Workers() const;

 private:
  struct Worker {
    std::shared_ptr<WorkerProcess> process;  // null: not running
    std::uint64_t incarnation = 0;           // of the process: a late end is known by it
    bool open = false;                       // Start has been replied to
    worker::Started started;
    std::vector<std::pair<Ready, Lost>> waiting;  // for Start's reply
    std::vector<Lost> holders;
    RestartPolicy policy;
  };

  absl::Status StartLocked(const WorkerKey& key, Worker* worker)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  worker::Call StartCall(const std::string& device) const;
  void OnStarted(const WorkerKey& key, std::uint64_t incarnation,
                 absl::StatusOr<WorkerProcess::Reply> reply);
  void OnEnded(const WorkerKey& key, std::uint64_t incarnation, const absl::Status& why);
  // The worker, unless it is another incarnation by now.
  Worker* FindLocked(const WorkerKey& key, std::uint64_t incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of one that is in the table no more: stops it, and tells those that wait for it.
  void GiveUp(Worker* worker);
  // The executor destroys it, whoever lets go of it last: that waits for its end, and may be its
  // own thread.
  std::shared_ptr<WorkerProcess> OwnLocked(std::unique_ptr<WorkerProcess> process)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WorkerSupervisorOptions options_;
  const Clock* const clock_;
  Executor* const executor_;

  mutable Mutex mutex_;
  std::map<WorkerKey, Worker> workers_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<WorkerProcess> probe_ ABSL_GUARDED_BY(mutex_);  // null: none is under way
  std::size_t processes_ ABSL_GUARDED_BY(mutex_) = 0;             // that are not destroyed yet
  CondVar ended_;                                                 // one of them has been
  std::uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_SUPERVISOR_H_
