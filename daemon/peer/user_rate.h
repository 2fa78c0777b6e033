// How often something may happen for each user.

#ifndef DAEMON_PEER_USER_RATE_H_
#define DAEMON_PEER_USER_RATE_H_

#include <cstddef>
#include <cstdint>

#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/rpc/connect_rate.h"

namespace gradsync::daemon {

// `burst` times in a row; all of them are regained within ConnectRate::kRegainNs. Thread-safe.
class UserRate {
 public:
  explicit UserRate(std::size_t burst) : rate_(burst) {}
  // Counts one for the user. False: there were too many.
  bool Take(const Tenant& user, std::uint64_t now_ns) {
    MutexLock lock(&mutex_);
    return rate_.Take(user, now_ns);
  }

 private:
  Mutex mutex_;
  ConnectRate rate_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_USER_RATE_H_
