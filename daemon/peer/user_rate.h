// How often something may happen for each user, or for each address.

#ifndef DAEMON_PEER_USER_RATE_H_
#define DAEMON_PEER_USER_RATE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/base/keyed_rate.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// `burst` times in a row for each user, as KeyedRate. Thread-safe.
class UserRate {
 public:
  explicit UserRate(std::size_t burst) : rate_(burst) {}
  // Counts one for the user. False: there were too many.
  bool Take(const Tenant& user, std::uint64_t now_ns) {
    const MutexLock lock(&mutex_);
    return rate_.Take(user, now_ns);
  }

 private:
  Mutex mutex_;
  KeyedRate<Tenant> rate_ ABSL_GUARDED_BY(mutex_);
};

// How often the nodes of jobs that are coordinated here may meet: `burst` times in a row for each
// user, twice as often for each address of other nodes, and eight times for each IPv6 network. A
// job that another node has begun does not count for the user: that node may name any user.
// Thread-safe.
class MeetingRate {
 public:
  explicit MeetingRate(std::size_t burst)
      : users_(burst), addresses_(2 * burst), networks_(8 * burst) {}
  // Counts one for all three. False: one of them has too many, and none counts. `user`: null if it
  // does not count for the user. An IPv4 address is its own network.
  bool Take(const Tenant* user, const std::string& address, const std::string& network,
            std::uint64_t now_ns) {
    const MutexLock lock(&mutex_);
    if ((user != nullptr && !users_.Has(*user, now_ns)) || !addresses_.Has(address, now_ns) ||
        !networks_.Has(network, now_ns)) {
      return false;
    }
    if (user != nullptr) users_.Take(*user, now_ns);
    addresses_.Take(address, now_ns);
    networks_.Take(network, now_ns);
    return true;
  }

 private:
  Mutex mutex_;
  KeyedRate<Tenant> users_ ABSL_GUARDED_BY(mutex_);
  KeyedRate<std::string> addresses_ ABSL_GUARDED_BY(mutex_);
  KeyedRate<std::string> networks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_USER_RATE_H_
