// Starts and watches the workers of this node: one per job and GPU.

#ifndef DAEMON_WORKER_WORKER_SUPERVISOR_H_
#define DAEMON_WORKER_WORKER_SUPERVISOR_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
#include "daemon/base/tenant.h"
#include "daemon/worker/restart_policy.h"
#include "daemon/worker/start_turns.h"
#include "daemon/worker/starting_workers.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_process.h"

namespace gradsync::daemon {

struct WorkerSupervisorOptions {
  // The value of cuda_library if this daemon uses no GPUs.
  static constexpr char kNoGpus[] = "none";

  WorkerProcessOptions process;
  // Libraries, as dlopen takes them. kNoGpus: no worker looks for GPUs.
  std::string cuda_library = "libcuda.so.1";
  std::string nccl_library = "libnccl.so.2";
  std::string nvml_library = "libnvidia-ml.so.1";
  // True: MPS, if it is on, serves several users at a time. False: a GPU that is shared through MPS
  // refuses trainers of any user but the daemon's.
  bool mps_multiuser = false;
  // A bucket that is on a GPU for this long counts as hung. With the gate kAllNodes all ranks were
  // ready when it began. With kNone this time also bounds how far one rank may be behind another.
  absl::Duration operation_limit = absl::Minutes(2);
  // How long a worker without an arena is kept for the next trainers.
  std::uint64_t idle_limit_ns = 60'000'000'000;
  // How often a worker is asked whether its GPU still works: between two steps nothing else would
  // show that it does not. A worker that does not answer is killed after process.hang_limit.
  std::uint64_t check_interval_ns = 5'000'000'000;
  // How many workers of a user, in each pod, may be without an open GPU at a time: they wait to
  // start, start, or end early. Such a worker counts until its process object is destroyed. One job
  // exceeds this only with requests for GPUs that do not exist: a node has at most 56 MIG instances
  // (7 on each of 8 GPUs).
  std::size_t max_starting_per_user = 64;
  // How many workers of a user, in each pod, start at a time; at least 1.
  std::size_t starting_at_once_per_user = 1;
  // A worker that has not opened its GPU after this time no longer keeps others from starting.
  std::uint64_t turn_limit_ns = 5'000'000'000;
  // How many ended workers of a user, in each pod, are remembered when another one starts. A
  // trainer may ask for many GPUs that do not exist.
  std::size_t max_ended_per_user = 64;
};

struct WorkerKey {
  std::string job;     // JobKey::Text()
  std::string device;  // UUID
  // The job's user, and the pod of the rank that asks. Ranks of one job in several pods share a
  // worker. While the worker waits or starts, it counts for the pod whose request started it. Once
  // it has ended, it is remembered for the pod that asked first.
  Tenant user = {};
  std::string job_id = {};  // for status
  // The address of the job's coordinator, as this daemon reaches it; empty: this daemon. Jobs of
  // the same name with different coordinators share no worker.
  std::string coordinator = {};

  bool operator<(const WorkerKey& other) const {
    return std::tie(job, device, coordinator) <
           std::tie(other.job, other.device, other.coordinator);
  }
};

// A worker's state, for status.
struct WorkerStatus {
  WorkerKey key;
  pid_t pid = 0;             // 0: it is not running
  bool awaits_turn = false;  // it will start
  bool open = false;         // it has opened its GPU: `started` and `memory` are known
  worker::Started started;   // its reply to Start
  worker::Pong memory;       // as reported last
  std::uint32_t restarts = 0;
  std::string last_failure;
};

// Starts a worker when it is first asked for, and keeps it until nobody has used it for
// idle_limit_ns. So a job's next trainers can use the worker and its communicator, which takes long
// to make. A worker that has ended is started again when it is next asked for, as RestartPolicy
// allows. It is remembered for idle_limit_ns, unless max_ended_per_user newer ones of the user have
// ended.
//
// Thread-safe. Callbacks are called on the workers' threads, or from within Ensure, Tick, Shutdown
// or the destructor. A call about one worker may answer callers that wait for another: if a start
// fails, the next worker in the queue starts. The destructor stops every worker, and no callback
// comes after it.
class WorkerSupervisor : public std::enable_shared_from_this<WorkerSupervisor> {
 public:
  // The receiver may drop its reference to the process on any thread.
  using Ready = std::function<void(absl::StatusOr<std::shared_ptr<WorkerProcess>>)>;
  using Lost = std::function<void(const WorkerKey&, const absl::Status&)>;

  // `lost` is called for every worker that ends by itself after it was ready. `executor` runs the
  // destructors of process objects. A destructor waits until its process has ended. `executor`
  // outlives the processes and this object.
  static std::shared_ptr<WorkerSupervisor> Make(WorkerSupervisorOptions options, Lost lost,
                                                const Clock* clock, Executor* executor);
  ~WorkerSupervisor();
  WorkerSupervisor(const WorkerSupervisor&) = delete;
  WorkerSupervisor& operator=(const WorkerSupervisor&) = delete;

  // Calls `ready` once, with a worker that has opened its GPU, or with an error: those of
  // FindCudaDevice, CheckCudaDeviceUsable, CheckMpsUsers, CudaDriver::Open and StatusOfInit;
  // WORKER_LOST; WORKER_RESTARTING; RESOURCE_EXHAUSTED WORKERS_STARTING for
  // max_starting_per_user. The worker may have to wait for others of the user to start.
  void Ensure(const WorkerKey& key, const Ready& ready);

  // Stops workers that have been idle for too long, makes the others check their GPUs, and starts
  // those that have waited for one that hangs. True if any worker is left.
  bool Tick();

  // Ends every process. When this returns, all calls have been answered, and no callback runs or
  // will run.
  void Shutdown();

  // Starts a worker that looks for the driver, NCCL and GPUs of this node, then ends. Call it once.
  // `found` is not called if Shutdown comes first.
  void Probe(std::function<void(absl::StatusOr<worker::Started>)> found);
  // The result of Probe; UNAVAILABLE until there is one.
  absl::StatusOr<worker::Started> Found() const;

  // Describes all workers. With `patience`, asks them for their memory and waits at most that long.
  // A worker that is too busy to answer is described with its last report.
  std::vector<WorkerStatus> Workers(absl::Duration patience = absl::ZeroDuration());

 private:
  // A call of Ensure that waits. Its key may name another pod than the worker's.
  struct Waiting {
    WorkerKey key;
    Ready ready;
  };
  struct Worker {
    std::shared_ptr<WorkerProcess> process;  // null: not running
    // Numbers the attempts to start a process: the last one, even if it waits for its turn or has
    // failed. A late callback has an older number.
    std::uint64_t incarnation = 0;
    // Set while it waits for its turn to start: the key of the call of Ensure that wants it. The
    // table's key may name another pod.
    std::optional<WorkerKey> queued;
    bool open = false;  // Start has been replied to
    worker::Started started;
    // Callers that wait for the reply to Start. If a process is ending, they wait for its end and
    // for the next process.
    std::vector<Waiting> waiting;
    RestartPolicy policy;
    std::uint32_t restarts = 0;
    std::uint64_t idle_since_ns = 0;  // 0: the process is in use, or awaited
    std::uint64_t checked_ns = 0;     // when it opened its GPU or was last asked about it
  };

  WorkerSupervisor(WorkerSupervisorOptions options, Lost lost, const Clock* clock,
                   Executor* executor);

  // Forgets all ended workers of the user but the newest max_ended_per_user.
  void ForgetEndedLocked(const Tenant& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `worker` is null if it was never started.
  absl::Status MayStartLocked(const WorkerKey& key, const Worker* worker) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts the worker, or lets it wait for its turn.
  absl::Status QueueLocked(const WorkerKey& key, Worker* worker)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The caller then sends Start, without the lock.
  absl::Status StartLocked(const WorkerKey& key, Worker* worker)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendStart(const WorkerKey& key, std::uint64_t incarnation,
                 const std::shared_ptr<WorkerProcess>& process);
  // Starts a worker whose turn has come; if it cannot start, the next one.
  void StartWaiting(std::uint64_t incarnation);
  worker::Call StartCall(const WorkerKey& key) const;
  void OnStarted(const WorkerKey& key, std::uint64_t incarnation,
                 absl::StatusOr<WorkerProcess::Reply> reply);
  void OnEnded(const WorkerKey& key, std::uint64_t incarnation, const absl::Status& why);
  // Makes the worker check its GPU and, with `memory`, report its memory. If the GPU has failed,
  // the worker ends. `answered` is called on the worker's thread, or from within. Keeps no
  // reference to the process, because with one the process would not count as idle.
  static void PingLocked(Worker* worker, bool memory, WorkerPort::Answered answered);
  void KeepFound(const absl::StatusOr<worker::Started>& found);
  void AskMemory(absl::Duration patience);
  // Null if the worker has another incarnation now.
  Worker* FindLocked(const WorkerKey& key, std::uint64_t incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called around a callback on a worker's thread. False after Shutdown: then skip the callback.
  bool BeginCallback();
  void EndCallback();
  void DropProbe();
  // Stops a worker that has left the table, and answers those that wait for it.
  void GiveUp(Worker* worker);
  // When the last reference is dropped, tells the process to stop. Then the executor destroys the
  // process object, because that object's own thread may hold the last reference. At last it calls
  // `destroyed`.
  std::shared_ptr<WorkerProcess> Share(std::unique_ptr<WorkerProcess> process,
                                       std::function<void()> destroyed) const;

  const WorkerSupervisorOptions options_;
  const Lost lost_;
  const Clock* const clock_;
  Executor* const executor_;
  const std::shared_ptr<StartingWorkers> starting_ = std::make_shared<StartingWorkers>();

  mutable Mutex mutex_;
  std::map<WorkerKey, Worker> workers_ ABSL_GUARDED_BY(mutex_);
  StartTurns turns_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<WorkerProcess> probe_ ABSL_GUARDED_BY(mutex_);  // until it has replied
  int callbacks_ ABSL_GUARDED_BY(mutex_) = 0;                     // running now
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar no_callbacks_;  // callbacks_ is 0
  absl::StatusOr<worker::Started> found_ ABSL_GUARDED_BY(mutex_) =
      absl::UnavailableError("a worker is looking for GPUs");
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_WORKER_SUPERVISOR_H_
