// A bound and listening Unix socket with its permissions.

#ifndef DAEMON_RPC_LISTENING_SOCKET_H_
#define DAEMON_RPC_LISTENING_SOCKET_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"

namespace gradsync {

// Owns the descriptor and, if it was bound here, the path, which is removed at the end.
class ListeningSocket {
 public:
  // Binds `path` with `mode`; `type` is SOCK_STREAM or SOCK_SEQPACKET. A socket that a dead daemon
  // left is replaced. FAILED_PRECONDITION: a live daemon listens there, the path is no socket, or
  // its directory is missing (says what to do).
  static absl::StatusOr<ListeningSocket> Bind(const std::string& path, int type, mode_t mode);
  // One that the service manager has bound.
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

}  // namespace gradsync

#endif  // DAEMON_RPC_LISTENING_SOCKET_H_
