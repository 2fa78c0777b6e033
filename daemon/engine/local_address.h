// Finds the address by which other nodes reach this one.

#ifndef DAEMON_ENGINE_LOCAL_ADDRESS_H_
#define DAEMON_ENGINE_LOCAL_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync::daemon {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Returns the numeric address ("10.0.0.7", "fd00::7") of `host`, which is a name or number of this
// machine. If `host` is empty: the address of `interface`, IPv4 before IPv6, never a link-local
// IPv6 one.
// INVALID_ARGUMENT if both are empty, NOT_FOUND if this machine has no such address.
absl::StatusOr<std::string> LocalAddress(const std::string& host, const std::string& interface);

// Returns this machine's numeric address on the route to `remote`, a numeric address. Sends
// nothing. INVALID_ARGUMENT if `remote` is not a numeric address, UNAVAILABLE without a route.
absl::StatusOr<std::string> LocalAddressTowards(const std::string& remote);

// INVALID_ARGUMENT if `number` is not a numeric address.
absl::StatusOr<SocketAddress> ParseAddress(const std::string& number, std::uint16_t port);

// Whether the address is one of this network namespace's own, whatever its port is. True if it
// cannot tell: a process of this machine is trusted less than another machine.
bool IsOwnAddress(const sockaddr_storage& address);

// The port of a bound socket; 0 for any other descriptor.
std::uint16_t LocalPort(int fd);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_LOCAL_ADDRESS_H_
