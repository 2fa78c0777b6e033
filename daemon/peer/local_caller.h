// Whose process is at the other end of a TCP connection, if it runs on this machine.

#ifndef DAEMON_PEER_LOCAL_CALLER_H_
#define DAEMON_PEER_LOCAL_CALLER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/peer/socket_table.h"

namespace gradsync::daemon {

// The end that gRPC names "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711". Its `interface` is 0.
// nullopt: the text is neither.
std::optional<TcpEnd> EndOfCaller(absl::string_view text);

// This process's ends of its connections to `address`, which is as above. It looks at each of its
// descriptors: with tens of thousands that takes tens of milliseconds.
std::vector<TcpEnd> OwnEndsTo(absl::string_view address);

// Whether the address, as getnameinfo() writes it, is one of this network namespace's own.
bool IsOwnAddress(const std::string& host);

// Why the process at `address` may not speak for a daemon; empty if it may. A process in this
// network namespace must be root's or have this process's user, and its connection must be open.
// The kernel says nothing of processes elsewhere: they may. `own_ends` returns this process's ends
// of its connections with `address`. It is called only for an address of this network namespace. If
// there are several connections, one of these users must own the other end of each. If this machine
// translates the addresses (NAT), the other end is not found, and the process may not speak.
//
// `table` is asked instead of the kernel if the kernel does not answer about a single connection
// (CanFindOwners() is false). Otherwise it is null. The connection was there at `since_ns`.
std::string WhyStranger(absl::string_view address,
                        absl::FunctionRef<std::vector<TcpEnd>()> own_ends, SocketTable* table,
                        std::uint64_t since_ns);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_LOCAL_CALLER_H_
