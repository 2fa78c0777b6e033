// Says which caller is at the other end of a TCP connection. Limits are per caller.
//
// On another machine, each address is a caller. On this machine, each user is a caller, whatever
// addresses it uses: otherwise one user could pass for many callers. The exceptions are root and
// this process's user, because they may run daemons: each address that they use is a caller, as if
// each daemon were on a machine of its own.
//
// A machine can use every address of its IPv6 network, and so pass for many callers. But a network
// may also have many machines, for example all those of a subnet. So a network is no caller: it has
// bounds of its own, far above those of a caller.

#ifndef DAEMON_ENGINE_CALLER_H_
#define DAEMON_ENGINE_CALLER_H_

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradsync::daemon {

// Where the other end of a connection is.
struct CallerPlace {
  bool local = false;                 // on this machine
  std::optional<std::uint32_t> user;  // whose process it is, if the kernel says so
};

// `connection` is a connected socket, and `other_end` the address of its other end. The kernel
// knows the user only while that end is open.
CallerPlace CallerPlaceOf(int connection, const sockaddr_storage& other_end);

// The address and the user of a caller. Zeros and a user: that user on this machine. Zeros and no
// user: somebody on this machine; the kernel does not say who. An address and a user: root or this
// process's user, on this machine. An address and no user: another machine.
using CallerKey = std::pair<std::array<std::uint8_t, 16>, std::optional<std::uint32_t>>;

// `ip` as in TcpEnd.
CallerKey CallerKeyOf(const std::array<std::uint8_t, 16>& ip, const CallerPlace& place);

// A machine chooses the address's other bytes itself (RFC 4291, section 2.5.1).
inline constexpr std::size_t kNetworkBytes = 8;
// The network of an IPv6 address of another machine: the address's first bytes, then zeros. An IPv4
// address and a caller on this machine are networks of their own. So is a link-local address: its
// other bytes name the machine.
CallerKey NetworkOf(const CallerKey& caller);
// "2001:db8::/64", or the address itself if it is a network of its own. `ip` as in TcpEnd.
std::string NetworkText(const std::array<std::uint8_t, 16>& ip);

// Finds the network that occurs most among `callers`. Returns the caller that occurs most in that
// network. `callers` is not empty.
CallerKey LargestOf(const std::vector<CallerKey>& callers);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_CALLER_H_
