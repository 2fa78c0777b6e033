// Limits how often a user connects.

#ifndef DAEMON_RPC_CONNECT_RATE_H_
#define DAEMON_RPC_CONNECT_RATE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// gRPC reads a new connection on any user's thread, and it reads all that the client has sent, even
// if the client has closed it meanwhile. So a user who connects and closes without end takes time
// from all. A user may connect `burst` times at once, and regains one connection every
// kRegainNs / `burst`. A job that begins needs one for each rank.
//
// Not thread-safe.
class ConnectRate {
 public:
  // The time to regain all connections, from none.
  static constexpr std::uint64_t kRegainNs = 16'000'000'000;

  explicit ConnectRate(std::size_t burst) : burst_(burst), each_ns_(kRegainNs / burst) {}

  // Counts a connection at `now_ns`. False: the user has connected too often.
  bool Take(const Tenant& user, std::uint64_t now_ns) {
    if (users_.size() >= kPruneAt) Prune(now_ns);
    // When the user will have regained all.
    std::uint64_t& all_at_ns = users_[user];
    const std::uint64_t from_ns = std::max(all_at_ns, now_ns);
    if (from_ns + each_ns_ > now_ns + burst_ * each_ns_) return false;
    all_at_ns = from_ns + each_ns_;
    return true;
  }

 private:
  static constexpr std::size_t kPruneAt = 1024;

  // Forgets the users that have regained all.
  void Prune(std::uint64_t now_ns) {
    for (auto it = users_.begin(); it != users_.end();) {
      it = it->second <= now_ns ? users_.erase(it) : std::next(it);
    }
  }

  const std::size_t burst_;
  const std::uint64_t each_ns_;
  std::map<Tenant, std::uint64_t> users_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CONNECT_RATE_H_
