#include "daemon/session/peer_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

// Linux 6.5; Debian 12's headers are older than some of the kernels it runs on.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace gradsync {

absl::StatusOr<PeerProcess> PeerOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return absl::ErrnoToStatus(errno, "SO_PEERCRED");
  }
  PeerProcess peer;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  peer.pid = credentials.pid;
  int pidfd = -1;
  size = sizeof(pidfd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) != 0 && peer.pid > 0) {
    pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
  }
  if (pidfd >= 0) peer.pidfd = std::make_shared<UniqueFd>(pidfd);
  return peer;
}

bool HasEnded(const PeerProcess& peer, int patience_ms) {
  if (peer.pidfd == nullptr) return false;
  pollfd waited{peer.pidfd->get(), POLLIN, 0};
  return poll(&waited, 1, patience_ms) > 0;
}

absl::Status ProcessEndedError(const PeerProcess& peer) {
  return MakeError(absl::StatusCode::kAborted, "PROCESS_ENDED",
                   absl::StrCat("its process (pid ", peer.pid, ") has ended"));
}

}  // namespace gradsync
