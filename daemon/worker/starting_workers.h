// The workers that count against a user's limit on starts.

#ifndef DAEMON_WORKER_STARTING_WORKERS_H_
#define DAEMON_WORKER_STARTING_WORKERS_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// For each user, in each pod, the workers that have opened no GPU, from when they are asked for
// until their process objects are destroyed. The first `at_once` of them may run. The others wait
// for their turn, so that a user who starts workers without end does not take the cores of the
// others.
//
// A worker is named by its incarnation; a later one has a higher number. Thread-safe; its lock is a
// leaf. Shared with the deleters of the process objects, which may outlive the supervisor.
class StartingWorkers {
 public:
  explicit StartingWorkers(std::size_t at_once) : at_once_(at_once) {}

  // True: the worker may run now. False: Remove will tell when.
  bool Add(const Tenant& user, std::uint64_t incarnation) {
    const MutexLock lock(&mutex_);
    std::set<std::uint64_t>& workers = workers_[user];
    workers.insert(incarnation);
    return workers.size() <= at_once_;
  }

  // The worker has opened its GPU, or does not run any more. Returns the worker that may run now
  // instead, if one waits. Idempotent.
  std::optional<std::uint64_t> Remove(const Tenant& user, std::uint64_t incarnation) {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(user);
    if (found == workers_.end()) return std::nullopt;
    std::set<std::uint64_t>& workers = found->second;
    std::optional<std::uint64_t> next;
    if (workers.size() > at_once_) {
      const auto first_waiting = std::next(workers.begin(), static_cast<std::ptrdiff_t>(at_once_));
      // Workers run in the order of their numbers: those that run are the lowest.
      if (workers.count(incarnation) > 0 && incarnation < *first_waiting) next = *first_waiting;
    }
    workers.erase(incarnation);
    if (workers.empty()) workers_.erase(found);
    return next;
  }

  std::size_t CountOf(const Tenant& user) const {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(user);
    return found == workers_.end() ? 0 : found->second.size();
  }

 private:
  const std::size_t at_once_;
  mutable Mutex mutex_;
  std::map<Tenant, std::set<std::uint64_t>> workers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_STARTING_WORKERS_H_
