#include "daemon/worker/engine_priorities.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace gradsync::daemon {
namespace {

// The kernel's weight of a thread falls by this factor with each nice value: sched(7).
constexpr double kWeightFactor = 1.25;
constexpr int kMostNice = 19;

}  // namespace

EnginePriorities::Engine::Engine(EnginePriorities* priorities, const Tenant& user, SetNice set)
    : priorities_(priorities), user_(user), set_(std::move(set)) {
  if (priorities_ == nullptr) return;
  nice_ = priorities_->daemon_nice_;
  const MutexLock lock(&priorities_->mutex_);
  priorities_->engines_[user_].push_back(this);
}

EnginePriorities::Engine::~Engine() {
  if (priorities_ == nullptr) return;
  const MutexLock lock(&priorities_->mutex_);
  const auto user = priorities_->engines_.find(user_);
  std::vector<Engine*>& engines = user->second;
  engines.erase(std::find(engines.begin(), engines.end(), this));
  priorities_->Look(engines);
  if (engines.empty()) priorities_->engines_.erase(user);
}

void EnginePriorities::Engine::Work() {
  if (priorities_ == nullptr) return;
  const std::uint64_t now_ns = priorities_->NowNs();
  worked_ns_.store(now_ns, std::memory_order_relaxed);
  if (now_ns < look_ns_.load(std::memory_order_relaxed)) return;
  const MutexLock lock(&priorities_->mutex_);
  priorities_->Look(priorities_->engines_[user_]);
}

EnginePriorities::EnginePriorities() : EnginePriorities(getpriority(PRIO_PROCESS, 0), nullptr) {}

EnginePriorities::EnginePriorities(int daemon_nice, const Clock* clock)
    : daemon_nice_(daemon_nice), clock_(clock) {}

void EnginePriorities::Look(const std::vector<Engine*>& engines) {
  const std::uint64_t now_ns = NowNs();
  const auto works = [now_ns](const Engine* engine) {
    const std::uint64_t worked_ns = engine->worked_ns_.load(std::memory_order_relaxed);
    return worked_ns != 0 && now_ns < worked_ns + kRestNs;
  };
  const auto working =
      std::max<std::ptrdiff_t>(1, std::count_if(engines.begin(), engines.end(), works));
  const double steps = std::log(static_cast<double>(working)) / std::log(kWeightFactor);
  const int nice = std::min(kMostNice, daemon_nice_ + static_cast<int>(std::lround(steps)));
  for (Engine* const engine : engines) {
    const bool rests = !works(engine);
    engine->look_ns_.store(rests ? 0 : now_ns + kLookNs, std::memory_order_relaxed);
    if (rests || nice == engine->nice_) continue;
    engine->nice_ = nice;
    engine->set_(nice);
  }
}

}  // namespace gradsync::daemon
