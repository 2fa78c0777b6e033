// Says which user owns a TCP socket of this network namespace. The kernel finds the socket by its
// two ends, however many others there are.

#ifndef DAEMON_ENGINE_SOCKET_OWNER_H_
#define DAEMON_ENGINE_SOCKET_OWNER_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace gradsync::daemon {

// One end of a TCP connection. A value.
struct TcpEnd {
  std::array<std::uint8_t, 16> ip{};  // an IPv6 address, or a mapped IPv4 address
  std::uint16_t port = 0;
  std::uint32_t interface = 0;  // of a link-local address; otherwise 0

  static TcpEnd Of(const sockaddr_storage& address);

  bool IsIpv4() const;
  std::string Text() const;  // "10.0.0.1:4711" or "[::1]:4711"
  bool operator<(const TcpEnd& other) const {
    return std::tie(ip, port, interface) < std::tie(other.ip, other.port, other.interface);
  }
  bool SamePlace(const TcpEnd& other) const { return ip == other.ip && port == other.port; }
};

// Whether the kernel answers (sock_diag(7), with its module tcp_diag).
bool CanFindOwners();
// The user of the connected socket that has the end `own`, and is connected to `other`. nullopt:
// there is no such socket, or the kernel does not answer.
std::optional<std::uint32_t> OwnerOf(const TcpEnd& own, const TcpEnd& other);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_SOCKET_OWNER_H_
