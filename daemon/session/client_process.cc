#include "daemon/session/client_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

// Since Linux 6.5. Debian 12's headers lack it, but its newer kernels have it.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace gradsync::daemon {

absl::StatusOr<ClientProcess> ClientOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return absl::ErrnoToStatus(errno, "SO_PEERCRED");
  }
  ClientProcess process;
  process.uid = credentials.uid;
  process.gid = credentials.gid;
  process.pid = credentials.pid;
  int pidfd = -1;
  size = sizeof(pidfd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) != 0 && process.pid > 0) {
    pidfd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
  }
  if (pidfd >= 0) process.pidfd = std::make_shared<UniqueFd>(pidfd);
  return process;
}

bool HasEnded(const ClientProcess& process, int patience_ms) {
  if (process.pidfd == nullptr) return false;
  pollfd waited{process.pidfd->get(), POLLIN, 0};
  return poll(&waited, 1, patience_ms) > 0;
}

bool Kill(const ClientProcess& process) {
  if (process.pidfd == nullptr) return false;
  if (syscall(SYS_pidfd_send_signal, process.pidfd->get(), SIGKILL, nullptr, 0) == 0) return true;
  return errno == ESRCH;
}

absl::Status ProcessEndedError(const ClientProcess& process) {
  return MakeError(absl::StatusCode::kAborted, reason::kProcessEnded,
                   absl::StrCat("its process (pid ", process.pid, ") has ended"));
}

}  // namespace gradsync::daemon
