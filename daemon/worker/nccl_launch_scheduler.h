// Launches a job's operations on its workers, one for each of its GPUs on this node and on others.

#ifndef DAEMON_WORKER_NCCL_LAUNCH_SCHEDULER_H_
#define DAEMON_WORKER_NCCL_LAUNCH_SCHEDULER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/reduce/launch_ledger.h"
#include "daemon/reduce/reducer.h"
#include "daemon/worker/collective_gate.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_port.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync::daemon {

// Every operation is launched on every worker, in one order, even on workers that have no rank in
// it. So the communicator between the workers outlives the trainers. It is made for the first
// bucket that needs it. It is made again, between two buckets, when a GPU is added, a worker has
// ended, or a new generation has other settings for NCCL.
//
// With the gate kAllNodes, a bucket that needs several GPUs is launched when the workers of all its
// ranks have reported that its gradients have arrived.
//
// Thread-safe. Makes no call with its lock held: one thread at a time calls workers and done() for
// all threads (Pump). Owns no worker and no operation.
class NcclLaunchScheduler : public std::enable_shared_from_this<NcclLaunchScheduler> {
 public:
  explicit NcclLaunchScheduler(CollectiveGate gate) : gate_(gate) {}

  void Launch(ReduceOperation* operation);
  void GiveUp(const GivenUpStep& step);
  // True if nothing is in flight, and none of its workers is alive.
  bool HasEnded() const;
  // The gate in force: kAllNodes or kNone. Nullopt while no workers are connected.
  std::optional<CollectiveGate> gate() const;

 private:
  struct Call {
    std::shared_ptr<WorkerPort> worker;
    worker::Call message;
    WorkerPort::Answered answered;
  };
  struct Kill {
    std::shared_ptr<WorkerPort> worker;
    absl::Status why;
  };
  // An operation that will be launched.
  struct Pending {
    ReduceOperation* operation = nullptr;
    bool asked = false;    // AwaitReady was sent to the workers of its ranks
    std::size_t left = 0;  // workers that have not answered it
  };

  // Removes members that have ended, and adds the operation's workers.
  void EnrollLocked(const ReduceOperation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ConnectLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if launches wait for the gate.
  bool GatedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskLocked(const std::shared_ptr<Pending>& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchLocked(ReduceOperation* operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does everything that can be done now.
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailPendingLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Finishes an operation that is not launched: as a void one, or a failed one.
  void SkipLocked(ReduceOperation* operation, const absl::Status& failure)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnId(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply);
  void OnConnected(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply);
  void OnReady(const std::weak_ptr<Pending>& asked, const absl::Status& status);
  // `connected`: the workers that the launch's communicator connects; empty if it needs none.
  void OnLaunched(std::uint64_t launch, const WorkerPort* worker,
                  const std::vector<std::weak_ptr<WorkerPort>>& connected,
                  const absl::StatusOr<WorkerPort::Reply>& reply);
  // Makes the calls that are due, unless another thread is doing so.
  void Pump();

  const CollectiveGate gate_;

  mutable Mutex mutex_;
  // The workers, by their rank in the communicator.
  std::vector<std::weak_ptr<WorkerPort>> members_ ABSL_GUARDED_BY(mutex_);
  NcclSettings nccl_ ABSL_GUARDED_BY(mutex_);  // of the job's running generation
  // The members are connected to each other. A single one needs no connection.
  bool joined_ ABSL_GUARDED_BY(mutex_) = true;
  // At least one worker holds a communicator.
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  // At least one of the connected GPUs is shared without MPS.
  bool time_sliced_ ABSL_GUARDED_BY(mutex_) = false;
  // Counts the attempts to connect. Answers of an earlier attempt are ignored.
  std::uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t connecting_ ABSL_GUARDED_BY(mutex_) = 0;  // answers that this attempt waits for
  LaunchLedger ledger_ ABSL_GUARDED_BY(mutex_);         // participants: the workers
  std::deque<std::shared_ptr<Pending>> pending_ ABSL_GUARDED_BY(mutex_);
  // By layout: the last step that was given up. A launch of that step may still arrive.
  std::map<std::uint64_t, std::uint64_t> given_up_ ABSL_GUARDED_BY(mutex_);
  std::vector<Call> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<Kill> kills_ ABSL_GUARDED_BY(mutex_);
  std::vector<LaunchRecord> finished_ ABSL_GUARDED_BY(mutex_);
  bool pumping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_NCCL_LAUNCH_SCHEDULER_H_
