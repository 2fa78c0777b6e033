// Limits what the nodes of one address, or of one IPv6 network, make this daemon keep.

#ifndef DAEMON_PEER_ADDRESS_ACCOUNTS_H_
#define DAEMON_PEER_ADDRESS_ACCOUNTS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// A node itself says whose job it joins, and that user is charged. Without these limits, a stranger
// could use up the quotas and the turns of all users. A job counts for the address of the rank that
// began it. One address leaves room for the others of its network. Thread-safe. Its results may
// outlive it.
class AddressAccounts {
 public:
  // An address may make the daemon keep as many bytes as so many users may have, and a network too.
  static constexpr std::uint64_t kQuotas = 2;
  static constexpr std::uint64_t kQuotasOfNetwork = 4;
  // The users whose jobs the nodes of an address, or of a network, may join at a time.
  static constexpr std::size_t kUsers = 32;
  static constexpr std::size_t kUsersOfNetwork = 64;

  // The account of one address.
  struct Account {
    std::shared_ptr<MemoryOrigin> memory;
    std::shared_ptr<void> user;  // counts the user until it is destroyed
  };

  // `bytes_per_user`: the quota of what the daemon keeps for a user.
  explicit AddressAccounts(std::uint64_t bytes_per_user) : bytes_per_user_(bytes_per_user) {}

  // A node at the address joins a job of `user`. `network`: of the address, as NetworkText() writes
  // it (caller.h); an IPv4 address is its own. RESOURCE_EXHAUSTED QUOTA: the jobs of too many
  // users.
  absl::StatusOr<Account> Open(const std::string& address, const std::string& network, uid_t user);
  // The bytes that an address or a network has.
  std::uint64_t BytesOf(const std::string& address) const;

 private:
  struct Address {
    std::map<uid_t, std::size_t> users;  // with the number of their nodes
    std::uint64_t bytes = 0;
  };
  struct State {
    mutable Mutex mutex;
    // Addresses and networks; only those that have a user or bytes.
    std::map<std::string, Address> addresses ABSL_GUARDED_BY(mutex);

    void DropIfUnusedLocked(const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  };
  struct Bound;
  class Origin;
  class User;

  const std::uint64_t bytes_per_user_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ADDRESS_ACCOUNTS_H_
