// A Unix socket that is bound, has its permissions, and listens.

#ifndef DAEMON_RPC_LISTENING_SOCKET_H_
#define DAEMON_RPC_LISTENING_SOCKET_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {

// Owns the descriptor. The destructor removes the path if Bind() made it.
class ListeningSocket {
 public:
  // Binds `path` with `mode`. `type` is SOCK_STREAM or SOCK_SEQPACKET. Replaces the socket of a
  // lost daemon. INVALID_ARGUMENT: the path is too long. FAILED_PRECONDITION: a live daemon listens
  // there, the path is not a socket, or its directory is missing or closed to this user.
  static absl::StatusOr<ListeningSocket> Bind(const std::string& path, int type, mode_t mode);
  // Whether Bind() can bind `path` once no daemon listens there. Binds and connects nothing. Fails
  // as Bind() does.
  static absl::Status CheckPath(const std::string& path);
  // Takes a socket that the service manager has bound.
  static ListeningSocket Adopt(int fd) { return ListeningSocket(UniqueFd(fd), ""); }

  ListeningSocket(ListeningSocket&&) noexcept = default;
  ListeningSocket& operator=(ListeningSocket&&) = delete;
  ~ListeningSocket();

  int fd() const { return fd_.get(); }

 private:
  ListeningSocket(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  UniqueFd fd_;
  std::string path_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_LISTENING_SOCKET_H_
