// Opens the two sockets on which trainers connect.

#ifndef DAEMON_APP_SOCKETS_H_
#define DAEMON_APP_SOCKETS_H_

#include "absl/status/statusor.h"
#include "daemon/config/options.h"
#include "daemon/rpc/listening_socket.h"

namespace gradsync::daemon {

struct Sockets {
  ListeningSocket grpc;
  ListeningSocket fd;  // hands out file descriptors
};

// Takes the sockets that the service manager has passed under the names "grpc" and "fd", or binds
// options.socket and the socket beside it. INVALID_ARGUMENT: the service manager passed other
// sockets.
absl::StatusOr<Sockets> OpenSockets(const Options& options);

// Whether OpenSockets() can bind both sockets once no other daemon listens there. Takes no account
// of sockets that the service manager will pass to a start.
absl::Status CheckSockets(const Options& options);

}  // namespace gradsync::daemon

#endif  // DAEMON_APP_SOCKETS_H_
