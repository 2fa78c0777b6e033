// Whose process is at the other end of a TCP connection, if it runs on this machine.

#ifndef DAEMON_PEER_LOCAL_CALLER_H_
#define DAEMON_PEER_LOCAL_CALLER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace gradsync::daemon {

// The users whose TCP sockets have the local address `address`, for example "ipv4:127.0.0.1:4711"
// or "ipv6:%5B::1%5D:4711" as gRPC names it. With `remote_port`, only sockets that are connected to
// that port. Empty if no socket of this network namespace has that address: the process is on
// another machine, or its connection has ended. There is more than one socket if a process listens
// there, or if several share a port (SO_REUSEADDR).
//
// `tables`: the contents of /proc/net/tcp and /proc/net/tcp6 (proc(5)), one after the other.
std::vector<std::uint32_t> UsersAt(absl::string_view address,
                                   std::optional<std::uint16_t> remote_port,
                                   absl::string_view tables);

// Asks the kernel. Returns a user who is neither root nor this process's user, if there is one.
std::optional<std::uint32_t> StrangerAt(absl::string_view address,
                                        std::optional<std::uint16_t> remote_port);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_LOCAL_CALLER_H_
