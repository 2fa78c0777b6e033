// The reducer for buckets that lie on GPUs: the workers there do it.

#ifndef DAEMON_WORKER_GPU_REDUCER_H_
#define DAEMON_WORKER_GPU_REDUCER_H_

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "daemon/base/mutex.h"
#include "daemon/reduce/reducer.h"
#include "daemon/worker/collective_gate.h"
#include "daemon/worker/gpu_team.h"

namespace gradsync {

// Finds the team of a job, whose generations share one. Never blocks; done() comes on a worker's
// thread, or from within Reduce(). A worker that dies fails every operation that it has.
//
// Thread-safe.
class GpuReducer final : public Reducer {
 public:
  explicit GpuReducer(CollectiveGate gate) : gate_(gate) {}

  void Reduce(ReduceOperation* operation) override;
  void GiveUp(const GivenUpStep& step) override;

  // Of the job that WorkerKey names so; as GpuTeam::gate().
  std::optional<CollectiveGate> GateOf(const std::string& job) const;

 private:
  std::shared_ptr<GpuTeam> TeamOf(const std::string& job);

  const CollectiveGate gate_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<GpuTeam>> teams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_GPU_REDUCER_H_
