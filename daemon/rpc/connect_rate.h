// Limits how often a user connects.

#ifndef DAEMON_RPC_CONNECT_RATE_H_
#define DAEMON_RPC_CONNECT_RATE_H_

#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// A user may connect `burst` times at once, and regains one connection every kRegainNs / `burst`. A
// process that connects too often is refused for a while, before the daemon looks up who it is.
// Otherwise it could keep the socket's queue full, and then the kernel refuses other clients that
// do not wait.
//
// Not thread-safe.
class ConnectRate {
 public:
  // The time to regain all connections, from none.
  static constexpr std::uint64_t kRegainNs = 16'000'000'000;
  // For how long a process that connects too often is refused, and how many such processes are
  // remembered.
  static constexpr std::uint64_t kRefusedNs = 500'000'000;
  static constexpr std::size_t kMostRefused = 1024;

  explicit ConnectRate(std::size_t burst) : burst_(burst), each_ns_(kRegainNs / burst) {}

  // Counts a connection at `now_ns`. False: the user has connected too often.
  bool Take(const Tenant& user, std::uint64_t now_ns) {
    if (users_.size() >= kPruneAt) Prune(now_ns);
    // The time at which the user will have regained all.
    std::uint64_t& all_at_ns = users_[user];
    const std::uint64_t from_ns = std::max(all_at_ns, now_ns);
    if (from_ns + each_ns_ > now_ns + burst_ * each_ns_) return false;
    all_at_ns = from_ns + each_ns_;
    return true;
  }
  // Whether Take() would count one.
  bool Has(const Tenant& user, std::uint64_t now_ns) const {
    const auto found = users_.find(user);
    return found == users_.end() || found->second + each_ns_ <= now_ns + burst_ * each_ns_;
  }

  // This process of the user is refused from now on. A process of another PID namespace has the pid
  // 0 here, and is never refused.
  void Refuse(pid_t process, const Tenant& user, std::uint64_t now_ns) {
    if (process == 0) return;
    if (refused_.size() >= kMostRefused) refused_.clear();
    refused_[process] = {user, now_ns + kRefusedNs};
  }
  // The user of a process that is refused; nullopt: it is not.
  std::optional<Tenant> Refuses(pid_t process, std::uint64_t now_ns) {
    const auto found = refused_.find(process);
    if (found == refused_.end()) return std::nullopt;
    if (now_ns < found->second.until_ns) return found->second.user;
    refused_.erase(found);
    return std::nullopt;
  }

 private:
  static constexpr std::size_t kPruneAt = 1024;

  struct Refused {
    Tenant user;
    std::uint64_t until_ns = 0;
  };

  // Forgets the users that have regained all.
  void Prune(std::uint64_t now_ns) {
    for (auto it = users_.begin(); it != users_.end();) {
      it = it->second <= now_ns ? users_.erase(it) : std::next(it);
    }
  }

  const std::size_t burst_;
  const std::uint64_t each_ns_;
  std::map<Tenant, std::uint64_t> users_;
  std::map<pid_t, Refused> refused_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CONNECT_RATE_H_
