#include "daemon/worker/gpu_reducer.h"

#include <iterator>

#include "daemon/worker/gpu_arena.h"

namespace gradsync::daemon {

std::shared_ptr<NcclLaunchScheduler> GpuReducer::SchedulerOf(const std::string& job) {
  MutexLock lock(&mutex_);
  std::shared_ptr<NcclLaunchScheduler>& scheduler = schedulers_[job];
  if (scheduler == nullptr) {
    scheduler = std::make_shared<NcclLaunchScheduler>(gate_);
    // Each new job removes the schedulers of jobs whose workers have ended. One that another thread
    // is about to use has no workers yet.
    for (auto it = schedulers_.begin(); it != schedulers_.end();) {
      const bool unused = it->first != job && it->second.use_count() == 1;
      it = unused && it->second->HasEnded() ? schedulers_.erase(it) : std::next(it);
    }
  }
  return scheduler;
}

void GpuReducer::Reduce(ReduceOperation* operation) {
  SchedulerOf(GpuArena::Of(*operation->device().arenas.front()).key().job)->Launch(operation);
}

void GpuReducer::GiveUp(const GivenUpStep& step) {
  for (const std::shared_ptr<DeviceArena>& arena : step.arenas) {
    if (arena == nullptr) continue;
    SchedulerOf(GpuArena::Of(*arena).key().job)->GiveUp(step);
    return;
  }
}

std::optional<CollectiveGate> GpuReducer::GateOf(const std::string& job) const {
  MutexLock lock(&mutex_);
  const auto found = schedulers_.find(job);
  return found == schedulers_.end() ? std::nullopt : found->second->gate();
}

}  // namespace gradsync::daemon
