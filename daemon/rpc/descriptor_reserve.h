// Keeps some file descriptors back. When all others are in use, the daemon can still accept the
// connections of users who have few, so that they can ask for health and status, and fetch memory.
//
// While it is not full, descriptors are scarce (DescriptorQuota): sessions, layouts and other nodes
// get none. Otherwise they would use up the descriptors that the reserve gets back when such a
// connection ends.

#ifndef DAEMON_RPC_DESCRIPTOR_RESERVE_H_
#define DAEMON_RPC_DESCRIPTOR_RESERVE_H_

#include <cstddef>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/rpc/connections.h"
#include "daemon/session/descriptor_quota.h"

namespace gradsync::daemon {

// Holds descriptors that nothing else uses. Used by one thread.
class DescriptorReserve {
 public:
  // The most connections that a user may have on one socket, counting the one that needs the
  // reserve.
  static constexpr std::size_t kPerUser = 4;
  // This many descriptors are left for root and the daemon's own user, whatever others do.
  static constexpr std::size_t kForTrusted = kPerUser * Connections::kDescriptors;

  // Holds `count`, or as many as there are. `quota` learns when descriptors are scarce. It outlives
  // this object, and may be null.
  explicit DescriptorReserve(std::size_t count, DescriptorQuota* quota = nullptr);

  // Gives `count` of them back to the process. False if it holds fewer.
  bool Free(std::size_t count);
  // Takes descriptors until it holds as many as at first.
  void Refill();
  bool full() const { return held_.size() == count_; }
  // Whether to keep a connection for which descriptors were freed. Its user has `connections`
  // others on the same socket. `trusted`: the user is root or the daemon's own.
  bool Admits(std::size_t connections, bool trusted) const {
    return connections < kPerUser && (trusted || held_.size() >= kForTrusted);
  }

 private:
  const std::size_t count_;
  DescriptorQuota* const quota_;
  std::vector<UniqueFd> held_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_DESCRIPTOR_RESERVE_H_
