// The address of a daemon, which trainers and operators write as "host" or "host:port".

#ifndef DAEMON_PEER_PEER_ADDRESS_H_
#define DAEMON_PEER_PEER_ADDRESS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::daemon {

// The longest host, in bytes.
inline constexpr std::size_t kMaxHostBytes = 255;

struct PeerAddress {
  std::string host;  // without brackets
  std::uint16_t port = 0;
  bool port_given = false;

  // "127.0.0.1", "::1", "localhost".
  bool IsLoopback() const;
  // "0.0.0.0" or "::": every interface.
  bool IsWildcard() const;
  // "host:port".
  std::string Text() const;
  // What gRPC dials: always a host, never another scheme such as "unix-abstract".
  std::string Target() const;
};

// A host is a name, or a numeric address. INVALID_ARGUMENT MALFORMED names the text.
absl::StatusOr<PeerAddress> ParsePeerAddress(absl::string_view text, std::uint16_t default_port);

// The host in gRPC's name of a caller, "ipv4:HOST:PORT" or "ipv6:%5BHOST%5D:PORT", with its zone.
// Empty if the text is neither.
std::string HostOfCaller(absl::string_view caller);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_ADDRESS_H_
