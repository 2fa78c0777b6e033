#include "daemon/worker/engine_priorities.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradsync::daemon {
namespace {

// The kernel's weight of a thread falls by this factor with each nice value: sched(7).
constexpr double kWeightFactor = 1.25;
constexpr int kMostNice = 19;

}  // namespace

EnginePriorities::Member::Member(EnginePriorities* priorities, const Tenant& user, SetNice set)
    : priorities_(priorities), user_(user) {
  if (priorities_ == nullptr) return;
  const MutexLock lock(&priorities_->mutex_);
  std::list<SetNice>& engines = priorities_->engines_[user_];
  at_ = engines.insert(engines.end(), std::move(set));
  priorities_->SetAll(engines);
}

EnginePriorities::Member::~Member() {
  if (priorities_ == nullptr) return;
  const MutexLock lock(&priorities_->mutex_);
  const auto user = priorities_->engines_.find(user_);
  user->second.erase(at_);
  priorities_->SetAll(user->second);
  if (user->second.empty()) priorities_->engines_.erase(user);
}

EnginePriorities::EnginePriorities() : EnginePriorities(getpriority(PRIO_PROCESS, 0)) {}

int EnginePriorities::NiceOf(std::size_t engines) const {
  const double steps = std::log(static_cast<double>(engines)) / std::log(kWeightFactor);
  return std::min(kMostNice, daemon_nice_ + static_cast<int>(std::lround(steps)));
}

void EnginePriorities::SetAll(const std::list<SetNice>& engines) const {
  for (const SetNice& set : engines) set(NiceOf(engines.size()));
}

}  // namespace gradsync::daemon
