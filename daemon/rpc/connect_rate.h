// Limits how often a user connects.

#ifndef DAEMON_RPC_CONNECT_RATE_H_
#define DAEMON_RPC_CONNECT_RATE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "daemon/base/keyed_rate.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// A user may connect `burst` times at once, and regains all of them within KeyedRate::kRegainNs. A
// process that connects too often is refused for a while, before the daemon looks up who it is.
// Otherwise it could keep the socket's queue full, and then the kernel refuses other clients that
// do not wait.
//
// Not thread-safe.
class ConnectRate {
 public:
  // For how long a process that connects too often is refused, and how many such processes are
  // remembered.
  static constexpr std::uint64_t kRefusedNs = 500'000'000;
  static constexpr std::size_t kMostRefused = 1024;

  explicit ConnectRate(std::size_t burst) : users_(burst) {}

  // Counts a connection at `now_ns`. False: the user has connected too often.
  bool Take(const Tenant& user, std::uint64_t now_ns) { return users_.Take(user, now_ns); }
  // Whether Take() would count one.
  bool Has(const Tenant& user, std::uint64_t now_ns) const { return users_.Has(user, now_ns); }

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
  struct Refused {
    Tenant user;
    std::uint64_t until_ns = 0;
  };

  KeyedRate<Tenant> users_;
  std::map<pid_t, Refused> refused_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CONNECT_RATE_H_
