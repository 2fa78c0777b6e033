// The workers that count against a user's limit on starts.

#ifndef DAEMON_WORKER_STARTING_WORKERS_H_
#define DAEMON_WORKER_STARTING_WORKERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// For each user, in each pod, the workers that have opened no GPU, from when they are asked for
// until their process objects are destroyed. A worker is named by its incarnation. Thread-safe; its
// lock is a leaf. Shared with the deleters of the process objects, which may outlive the
// supervisor.
class StartingWorkers {
 public:
  void Add(const Tenant& user, std::uint64_t incarnation) {
    const MutexLock lock(&mutex_);
    workers_[user].insert(incarnation);
  }

  // The worker has opened its GPU, or its process object is destroyed. Idempotent.
  void Remove(const Tenant& user, std::uint64_t incarnation) {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(user);
    if (found == workers_.end()) return;
    found->second.erase(incarnation);
    if (found->second.empty()) workers_.erase(found);
  }

  std::size_t CountOf(const Tenant& user) const {
    const MutexLock lock(&mutex_);
    const auto found = workers_.find(user);
    return found == workers_.end() ? 0 : found->second.size();
  }

 private:
  mutable Mutex mutex_;
  std::map<Tenant, std::set<std::uint64_t>> workers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_STARTING_WORKERS_H_
