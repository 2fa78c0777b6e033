// Limits the engines of a daemon: each is a process, with threads and memory in the daemon.

#ifndef DAEMON_PEER_ENGINE_QUOTA_H_
#define DAEMON_PEER_ENGINE_QUOTA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// Other nodes decide when an engine is made, and an engine that is connecting takes up to 10 s to
// end. An engine counts for the tenant that is charged for its job. On the coordinator, that is the
// tenant of the rank that began the job, or the user without a pod if that rank is on another node.
// On an agent, it is the tenant of the rank that attached the node. Thread-safe. Its results may
// outlive it, but not its memory quota.
class EngineQuota {
 public:
  // All users together may have as many engines as this number of users may have.
  static constexpr std::size_t kUsers = 4;
  // `memory` is charged for the engines, and outlives the results of Take(). Null: nothing is
  // charged.
  EngineQuota(std::size_t per_user, ArenaQuota* memory) : per_user_(per_user), memory_(memory) {}

  // Counts one engine that takes `bytes` of memory, until the result is destroyed.
  // RESOURCE_EXHAUSTED QUOTA: the user would have too many engines or too much memory in them, or
  // all users together too many engines.
  absl::StatusOr<std::shared_ptr<void>> Take(const Tenant& user, std::uint64_t bytes);
  // The most engines that there may be at a time.
  std::size_t total() const { return kUsers * per_user_; }

 private:
  struct State {
    Mutex mutex;
    std::map<Tenant, std::size_t> held ABSL_GUARDED_BY(mutex);  // only users that have some
    std::size_t all ABSL_GUARDED_BY(mutex) = 0;
  };
  struct Held;
  const std::size_t per_user_;
  ArenaQuota* const memory_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ENGINE_QUOTA_H_
