// The side socket, which exchanges a one-time nonce for file descriptors
// (proto/gradsync/shared_memory.h).

#ifndef CLIENT_SRC_FD_SOCKET_H_
#define CLIENT_SRC_FD_SOCKET_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/src/unix_socket.h"

namespace gradsync::client {

// Path of the side socket beside a daemon's gRPC socket: "X-fd.sock" for "X.sock".
std::string FdSocketPath(absl::string_view socket);

// Fetches exactly `count` descriptors, close-on-exec, from a running daemon. Statuses: those of
// ConnectUnixSocket, and the daemon's own.
//   UNAVAILABLE  DAEMON_LOST: the daemon does not answer, or was lost.
//   INTERNAL     PROTOCOL_VIOLATION: the answer breaks the contract.
absl::StatusOr<std::vector<FileDescriptor>> FetchDescriptors(const std::string& path,
                                                             absl::string_view nonce,
                                                             std::size_t count,
                                                             absl::Time deadline);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_FD_SOCKET_H_
