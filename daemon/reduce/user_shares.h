// How much each user has had of a few shared threads, so that the next turn goes to the user that
// has had the least.

#ifndef DAEMON_REDUCE_USER_SHARES_H_
#define DAEMON_REDUCE_USER_SHARES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// Counts the bytes that turns read and write. A turn that takes longer than its bytes usually do,
// for example because the sums are subnormal numbers, counts for more bytes.
//
// Not thread-safe: its owner guards it with its own mutex. Allocates only when more users want
// turns at a time than ever before.
class UserShares {
 public:
  // A slow turn counts for at most this many times its bytes. So a thread that the kernel stops for
  // a while does not cost its user many turns.
  static constexpr std::uint64_t kMostTimes = 8;

  struct User {
    Tenant id;
    std::uint64_t number = 0;       // of this use of the entry: another user may have it later
    std::uint64_t served = 0;       // in bytes; only differences between users matter
    std::uint64_t flow_served = 0;  // used by HostReducer: bytes of the flow whose turn began last
    std::size_t wanted = 0;         // how many things wait for turns
    std::size_t running = 0;        // turns
  };

  // Returns the entry of a user. It is valid while the user wants turns or has some.
  User* Of(const Tenant& id);
  // One more thing of the user waits for turns. The user gets no credit for a time in which it
  // wanted none.
  void Want(User* user);
  void Unwant(User* user) { --user->wanted; }
  void Begin(User* user, std::uint64_t bytes);
  // The turn took `ns` nanoseconds. Returns for how many bytes it counts beyond `bytes`.
  std::uint64_t End(User* user, std::uint64_t bytes, std::uint64_t ns);

 private:
  // Users that want turns, or have had more than the others.
  std::vector<std::unique_ptr<User>> users_;
  std::uint64_t served_ = 0;  // of the user whose turn began last
  std::uint64_t last_number_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_USER_SHARES_H_
