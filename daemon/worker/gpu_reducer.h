// The reducer for buckets on GPUs, which the GPUs' workers reduce.

#ifndef DAEMON_WORKER_GPU_REDUCER_H_
#define DAEMON_WORKER_GPU_REDUCER_H_

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "daemon/base/mutex.h"
#include "daemon/reduce/reducer.h"
#include "daemon/worker/collective_gate.h"
#include "daemon/worker/nccl_launch_scheduler.h"

namespace gradsync::daemon {

// Hands each operation to the launch scheduler of its job. All generations of a job share one
// scheduler. Never blocks. done() is called on a thread that brings a worker's answer, or from
// within Reduce() or GiveUp(), perhaps of another operation. If a worker is lost, its operations
// fail.
//
// Thread-safe.
class GpuReducer final : public Reducer {
 public:
  explicit GpuReducer(CollectiveGate gate) : gate_(gate) {}

  void Reduce(ReduceOperation* operation) override;
  void GiveUp(const GivenUpStep& step) override;

  // NcclLaunchScheduler::gate() of the job with this WorkerKey::job.
  std::optional<CollectiveGate> GateOf(const std::string& job) const;

 private:
  std::shared_ptr<NcclLaunchScheduler> SchedulerOf(const std::string& job);

  const CollectiveGate gate_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<NcclLaunchScheduler>> schedulers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_GPU_REDUCER_H_
