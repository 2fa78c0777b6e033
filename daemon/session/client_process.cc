#include "daemon/session/client_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/base/error.h"

// Since Linux 6.5. Debian 12's headers lack it, but its newer kernels have it.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace gradsync::daemon {
namespace {

// True if the process runs as `uid`, or if /proc does not say so.
bool RunsAs(pid_t pid, uid_t uid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, "Uid:")) continue;
    // Real, effective, saved, file system.
    for (const absl::string_view id : absl::StrSplit(line.substr(4), '\t', absl::SkipEmpty())) {
      uid_t has = 0;
      if (absl::SimpleAtoi(id, &has) && has == uid) return true;
    }
    return false;
  }
  return true;
}

// True if the machine or this process lacks what a call needs: it may succeed later.
bool RanOut(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

// True if no process has this pid. False for 0, a process of another PID namespace.
bool HasVanished(pid_t pid) { return pid > 0 && kill(pid, 0) != 0 && errno == ESRCH; }

}  // namespace

UniqueFd OpenProcess(pid_t pid, uid_t uid) {
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  // The descriptor keeps the pid's process, so this cannot look at a third one.
  return pidfd.valid() && RunsAs(pid, uid) ? std::move(pidfd) : UniqueFd();
}

absl::StatusOr<ucred> CredentialsOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return absl::ErrnoToStatus(errno, "SO_PEERCRED");
  }
  return credentials;
}

absl::StatusOr<ClientProcess> ClientOf(int socket, const CgroupReader& read) {
  const absl::StatusOr<ucred> credentials = CredentialsOf(socket);
  if (!credentials.ok()) return credentials.status();
  ClientProcess process;
  process.uid = credentials->uid;
  process.gid = credentials->gid;
  process.pid = credentials->pid;
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  UniqueFd opened;
  errno = 0;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) {
    opened = UniqueFd(pidfd);
  } else if (!RanOut(errno) && process.pid > 0) {
    errno = 0;
    opened = OpenProcess(process.pid, process.uid);
  }
  if (!opened.valid() && RanOut(errno)) return absl::ErrnoToStatus(errno, "pidfd");
  absl::Status ran_out;
  const CgroupReader noting = [&](pid_t pid) {
    auto text = read(pid);
    if (absl::IsResourceExhausted(text.status())) ran_out = text.status();
    return text;
  };
  process.place = PodPlaceOf(process.pid, opened.get(), noting);
  // Otherwise a process in a pod could pass for one outside.
  if (!ran_out.ok()) return ran_out;
  if (opened.valid()) process.pidfd = std::make_shared<UniqueFd>(std::move(opened));
  // A child may still hold the socket. It would be in no pod, because nothing says in which one,
  // and its end would be seen by nobody.
  if (process.pidfd != nullptr ? HasEnded(process, /*patience_ms=*/0) : HasVanished(process.pid)) {
    return ProcessEndedError(process);
  }
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
