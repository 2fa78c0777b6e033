// Who is at the other end of a Unix socket, as the kernel says.

#ifndef DAEMON_SESSION_PEER_PROCESS_H_
#define DAEMON_SESSION_PEER_PROCESS_H_

#include <sys/types.h>

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"

namespace gradsync {

struct PeerProcess {
  uid_t uid = 0;
  gid_t gid = 0;
  // 0: in another PID namespace; then `pidfd` is known only by SO_PEERPIDFD (Linux 6.5).
  pid_t pid = 0;
  // Readable once the process has ended; proof against reuse of the pid. Null: unknown, the
  // stream's end alone tells.
  std::shared_ptr<UniqueFd> pidfd;
};

// SO_PEERCRED, then SO_PEERPIDFD or pidfd_open. INTERNAL if the kernel does not say who it is.
absl::StatusOr<PeerProcess> PeerOf(int socket);

// True if the process is known to have ended, or ends within `patience_ms`: a process that is
// killed closes its connection a moment before its end shows.
bool HasEnded(const PeerProcess& peer, int patience_ms);
// How its end is known, for the other ranks' messages.
absl::Status ProcessEndedError(const PeerProcess& peer);

}  // namespace gradsync

#endif  // DAEMON_SESSION_PEER_PROCESS_H_
