// The workers of one job, one for each of its GPUs on this node and on others, as one reducer.

#ifndef DAEMON_WORKER_GPU_TEAM_H_
#define DAEMON_WORKER_GPU_TEAM_H_

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
#include "daemon/reduce/reducer.h"
#include "daemon/worker/collective_gate.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_port.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

// Whatever is launched is launched on every worker, whether ranks on its GPU take part or not, in
// one order; so the communicator between them outlives trainers. It is made when the first bucket
// comes that needs it, and again when a GPU has come or a worker has gone, between two buckets.
//
// With the gate closed, a bucket is launched between GPUs when the workers of all its ranks have
// said that its gradients are there.
//
// Thread-safe, and calls nobody with its lock held: one thread at a time gives calls and says done,
// the others leave that to it.
class GpuTeam : public std::enable_shared_from_this<GpuTeam> {
 public:
  explicit GpuTeam(CollectiveGate gate) : gate_(gate) {}

  void Launch(ReduceOperation* operation);
  void GiveUp(const GivenUpStep& step);
  // None of its workers lives.
  bool Over() const;
  // The one in force: kAllNodes or kNone. Nullopt while there is nothing between GPUs.
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
  // An operation that is to be launched.
  struct Pending {
    ReduceOperation* operation = nullptr;
    bool asked = false;    // the workers of its ranks, whether its gradients are there
    std::size_t left = 0;  // of these, those that have not answered
  };
  // An operation on its way through the workers.
  struct Flight {
    ReduceOperation* operation = nullptr;
    std::size_t left = 0;  // workers that have not answered
    ReduceTimes times;
    worker::LaunchDone result;  // of the first that has answered: they are the same
    bool is_void = false;
    absl::Status failure;
  };

  // The members that live, and the operation's own.
  void EnrollLocked(const ReduceOperation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ConnectLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Launches go through the gate.
  bool GatedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AskLocked(const std::shared_ptr<Pending>& pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchLocked(ReduceOperation* operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What can be done next.
  void AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailPendingLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Says done of what was not launched.
  void AnswerLocked(ReduceOperation* operation, const absl::Status& failure)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnId(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply);
  void OnConnected(std::uint64_t round, const absl::StatusOr<WorkerPort::Reply>& reply);
  void OnReady(const std::weak_ptr<Pending>& asked, const absl::Status& status);
  void OnLaunched(const std::shared_ptr<Flight>& flight,
                  const absl::StatusOr<WorkerPort::Reply>& reply);
  // Gives the calls and says done, unless another thread is at it.
  void Pump();

  const CollectiveGate gate_;

  mutable Mutex mutex_;
  // In this order they are ranks of the communicator.
  std::vector<std::weak_ptr<WorkerPort>> members_ ABSL_GUARDED_BY(mutex_);
  NcclSettings nccl_ ABSL_GUARDED_BY(mutex_);   // of the job's running generation
  bool joined_ ABSL_GUARDED_BY(mutex_) = true;  // connected as they are; one needs no connection
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;  // some of them are, to whomever
  // Since they were: some GPU is shared without MPS.
  bool time_sliced_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;  // of connecting; late answers are known by it
  std::size_t connecting_ ABSL_GUARDED_BY(mutex_) = 0;  // answers that are to come
  std::size_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<Pending>> pending_ ABSL_GUARDED_BY(mutex_);
  // The last step of a layout that was given up: one of its launches may come after the word of it.
  std::map<std::uint64_t, std::uint64_t> given_up_ ABSL_GUARDED_BY(mutex_);
  std::vector<Call> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<Kill> kills_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Flight>> finished_ ABSL_GUARDED_BY(mutex_);
  bool pumping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_GPU_TEAM_H_
