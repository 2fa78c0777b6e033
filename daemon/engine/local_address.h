// The address of this node that other nodes reach.

#ifndef DAEMON_ENGINE_LOCAL_ADDRESS_H_
#define DAEMON_ENGINE_LOCAL_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// The number ("10.0.0.7", "fd00::7") of `host`, a name or number of this machine, or of the network
// interface of that name if `host` is empty (IPv4 before IPv6, never link-local IPv6).
// INVALID_ARGUMENT if both are empty, NOT_FOUND if this machine has no such address.
absl::StatusOr<std::string> LocalAddress(const std::string& host, const std::string& interface);

// The number under which this machine speaks to `peer`, a numeric address; nothing is sent.
// INVALID_ARGUMENT if it is none, UNAVAILABLE if no route leads there.
absl::StatusOr<std::string> LocalAddressTowards(const std::string& peer);

// INVALID_ARGUMENT unless `number` is one.
absl::StatusOr<SocketAddress> ParseAddress(const std::string& number, std::uint16_t port);

// Of a bound socket; 0 if it is none.
std::uint16_t LocalPort(int fd);

}  // namespace gradsync

#endif  // DAEMON_ENGINE_LOCAL_ADDRESS_H_
