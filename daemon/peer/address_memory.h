// Limits what the nodes of one address, or of one IPv6 network, make this daemon keep.

#ifndef DAEMON_PEER_ADDRESS_MEMORY_H_
#define DAEMON_PEER_ADDRESS_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// A node itself says whose job it joins, and that user is charged. Without these limits, a stranger
// could use up the quotas of all users. A job counts for the address of the rank that began it. One
// address leaves room for the others of its network. Thread-safe. Its results may outlive it.
class AddressMemory {
 public:
  // An address may make the daemon keep as many bytes as so many users may have, and a network too.
  static constexpr std::uint64_t kQuotas = 2;
  static constexpr std::uint64_t kQuotasOfNetwork = 4;

  // `bytes_per_user`: the quota of what the daemon keeps for a user.
  explicit AddressMemory(std::uint64_t bytes_per_user) : bytes_per_user_(bytes_per_user) {}

  // The memory of the nodes at the address. `network`: of the address, as NetworkText() writes it
  // (caller.h); an IPv4 address is its own.
  std::shared_ptr<MemoryOrigin> Of(const std::string& address, const std::string& network) const;
  // The bytes that an address or a network has.
  std::uint64_t BytesOf(const std::string& address) const;

 private:
  struct State {
    mutable Mutex mutex;
    // Of addresses and networks; only those that have some.
    std::map<std::string, std::uint64_t> bytes ABSL_GUARDED_BY(mutex);
  };
  class Origin;

  const std::uint64_t bytes_per_user_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ADDRESS_MEMORY_H_
