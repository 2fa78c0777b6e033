// Identifies the process at the other end of a Unix socket, as the kernel knows it.

#ifndef DAEMON_SESSION_CLIENT_PROCESS_H_
#define DAEMON_SESSION_CLIENT_PROCESS_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/session/pod_place.h"

namespace gradsync::daemon {

// A trainer, or another program that calls the daemon.
struct ClientProcess {
  uid_t uid = 0;
  gid_t gid = 0;
  // 0 for a process of another PID namespace. The pidfd of such a process is known only since Linux
  // 6.5 (SO_PEERPIDFD).
  pid_t pid = 0;
  // Where it runs. Read once, when it connects.
  PodPlace place;
  // Readable once the process has ended. Unlike the pid it is never reused. Null: unknown; then
  // only the end of the stream shows the end of the process.
  std::shared_ptr<UniqueFd> pidfd;

  Tenant tenant() const { return Tenant(uid, place.pod); }
};

// The process at the other end, and its user. Fails if the kernel does not know the process.
absl::StatusOr<ucred> CredentialsOf(int socket);
// Asks the kernel: SO_PEERCRED, then SO_PEERPIDFD or pidfd_open, then /proc for its pod. Fails if
// the kernel does not know the process, or if it has ended. RESOURCE_EXHAUSTED: the daemon lacks
// descriptors or memory to find out.
absl::StatusOr<ClientProcess> ClientOf(int socket, const CgroupReader& read = ReadCgroups);

// A pidfd of process `pid`, if it runs as `uid`. Invalid otherwise, or if there is no such process.
// Before Linux 6.5 the pid may have been reused since the kernel named it. Thanks to the check of
// `uid`, the daemon takes no other user's process for the client. But if /proc hides the process
// (hidepid, ProtectProc=), this checks nothing. Then the daemon has no right to kill it either.
UniqueFd OpenProcess(pid_t pid, uid_t uid);

// True if the process has ended, or ends within `patience_ms`. A killed process closes its
// connection a moment before its pidfd becomes readable. False if its end cannot be known.
bool HasEnded(const ClientProcess& process, int patience_ms);
// Kills exactly this process. True if it was killed or had ended already. False if the daemon may
// not kill it, or has no pidfd of it.
bool Kill(const ClientProcess& process);
// Says how the daemon knows that the process has ended. Part of the other ranks' errors.
absl::Status ProcessEndedError(const ClientProcess& process);

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_CLIENT_PROCESS_H_
