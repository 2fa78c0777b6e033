// Limits the open connections of each address to the peer port, so that one machine leaves room for
// the others.

#ifndef DAEMON_PEER_CONNECTION_LIMIT_H_
#define DAEMON_PEER_CONNECTION_LIMIT_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/clock.h"

namespace gradsync::daemon {

// It does not own connections and is not told when one ends: gRPC closes them. It sees that a
// descriptor names another socket, or none. Not thread-safe.
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
  // them, would have too many.
  absl::Status Admit(int connection, const sockaddr_storage& peer);

 private:
  struct Open {
    int descriptor = -1;
    ino_t socket = 0;
  };
  struct Address {
    std::vector<Open> open;
    std::uint64_t looked_ns = 0;
  };
  using Key = std::array<std::uint8_t, 16>;  // an IPv6 address, or a mapped IPv4 address

  static Key KeyOf(const sockaddr_storage& peer);
  void ForgetClosed(Address* address);
  void ForgetAllClosed();

  const Bounds bounds_;
  const Clock* const clock_;
  std::map<Key, Address> addresses_;
  std::size_t count_ = 0;  // of all addresses
  std::uint64_t looked_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_CONNECTION_LIMIT_H_
