// Who is at the other end of a TCP connection, for limits of each caller.
//
// A caller is an address. On this machine a user is a caller, whatever addresses it uses: otherwise
// it could pass for many. Only users who may run a daemon, root and this process's user, are
// callers of their own at each address, as the daemons of several machines are.

#ifndef DAEMON_ENGINE_CALLER_H_
#define DAEMON_ENGINE_CALLER_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

namespace gradsync::daemon {

// Where the other end of a connection is.
struct CallerPlace {
  bool local = false;                 // on this machine
  std::optional<std::uint32_t> user;  // whose process it is, if the kernel says so
};

// Of a connected socket, with the address of its other end. The kernel knows the user while that
// end is open.
CallerPlace CallerPlaceOf(int connection, const sockaddr_storage& peer);

// Zeros and a user: this user of this machine. Zeros alone: of this machine, and the kernel does
// not say whose. An address and a user: root or this process's user. An address alone: of another
// machine.
using CallerKey = std::pair<std::array<std::uint8_t, 16>, std::optional<std::uint32_t>>;

// `ip` as in TcpEnd.
CallerKey CallerKeyOf(const std::array<std::uint8_t, 16>& ip, const CallerPlace& place);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_CALLER_H_
