#include "daemon/worker/gpu_reducer.h"

#include <iterator>

#include "daemon/worker/gpu_arena.h"

namespace gradsync {

std::shared_ptr<GpuTeam> GpuReducer::TeamOf(const std::string& job) {
  MutexLock lock(&mutex_);
  std::shared_ptr<GpuTeam>& team = teams_[job];
  if (team == nullptr) {
    team = std::make_shared<GpuTeam>(gate_);
    // Those of jobs whose workers have gone go when another one comes.
    for (auto it = teams_.begin(); it != teams_.end();) {
      it = it->first != job && it->second->Over() ? teams_.erase(it) : std::next(it);
    }
  }
  return team;
}

void GpuReducer::Reduce(ReduceOperation* operation) {
  TeamOf(operation->gpu.arenas.front()->key().job)->Launch(operation);
}

void GpuReducer::GiveUp(const GivenUpStep& step) {
  for (const std::shared_ptr<GpuArena>& arena : step.arenas) {
    if (arena == nullptr) continue;
    TeamOf(arena->key().job)->GiveUp(step);
    return;
  }
}

std::optional<CollectiveGate> GpuReducer::GateOf(const std::string& job) const {
  MutexLock lock(&mutex_);
  const auto found = teams_.find(job);
  return found == teams_.end() ? std::nullopt : found->second->gate();
}

}  // namespace gradsync
