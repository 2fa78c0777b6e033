// Limits the open connections of each address to the peer port, so that one machine leaves room for
// the others. Ends connections that do harm.

#ifndef DAEMON_PEER_CONNECTION_LIMIT_H_
#define DAEMON_PEER_CONNECTION_LIMIT_H_

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// It does not own connections and is not told when one ends: gRPC closes them. It sees that a
// descriptor names another socket, or none. Thread-safe.
class ConnectionLimit {
 public:
  struct Bounds {
    std::size_t per_address = 0;
    std::size_t all = 0;
  };
  // Bounds for half the descriptors that the process may have and does not need itself.
  static Bounds OfProcess();

  // `clock` outlives it.
  ConnectionLimit(Bounds bounds, const Clock* clock) : bounds_(bounds), clock_(clock) {}

  // Counts the connection for as long as it is open. RESOURCE_EXHAUSTED: its address, or all of
  // them, would have too many, or the address has to wait after an End().
  absl::Status Admit(int connection, const sockaddr_storage& peer);
  // Ends the connection from this port of an address: `ip` has 4 or 16 bytes, in the network's
  // order. For a second the address gets no new one. False if there is no such connection any more.
  bool End(const std::string& ip, std::uint16_t port);
  // Ends every connection, and refuses new ones.
  void EndAll();
  // The addresses on this side of the open connections from this port of an address, as above.
  std::vector<sockaddr_storage> OwnEnds(const std::string& ip, std::uint16_t port);

 private:
  struct Open {
    BorrowedSocket socket;
    std::uint16_t port = 0;  // the peer's
  };
  struct Address {
    std::vector<Open> open;
    std::uint64_t looked_ns = 0;
    std::uint64_t refused_until_ns = 0;
  };
  using Key = std::array<std::uint8_t, 16>;  // an IPv6 address, or a mapped IPv4 address

  // `ip` as above, or of another length, which names no address.
  static Key KeyOf(absl::string_view ip);
  void ForgetClosedLocked(Address* address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetAllClosedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Bounds bounds_;
  const Clock* const clock_;

  Mutex mutex_;
  std::map<Key, Address> addresses_ ABSL_GUARDED_BY(mutex_);
  std::size_t count_ ABSL_GUARDED_BY(mutex_) = 0;  // of all addresses
  bool all_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t looked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_CONNECTION_LIMIT_H_
