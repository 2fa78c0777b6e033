#include "client/src/unix_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/error.h"
#include "gradsync/duration_text.h"

namespace gradsync::client {
namespace {

std::string ErrnoText(int error) {
  std::array<char, 128> text;
  return strerror_r(error, text.data(), text.size());
}

std::string GroupName(gid_t gid) {
  std::array<char, 4096> buffer;
  struct group entry;
  struct group* found = nullptr;
  const bool named =
      getgrgid_r(gid, &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr;
  return named ? found->gr_name : absl::StrCat(gid);
}

absl::Status NoPermission(const std::string& path) {
  std::string hint = "check the permissions of the socket and of its directory";
  const std::string folder = path.substr(0, path.rfind('/'));
  struct stat status;
  if (stat(path.c_str(), &status) == 0) {
    hint = absl::StrCat("it belongs to user id ", status.st_uid, " and group ",
                        GroupName(status.st_gid), "; run the trainer as a member of that group");
  } else if (stat(folder.c_str(), &status) == 0 && (status.st_mode & S_IXGRP) != 0) {
    const std::string group = GroupName(status.st_gid);
    hint = absl::StrCat("its folder ", folder, " belongs to group ", group,
                        "; add yourself to it (sudo usermod --append --groups ", group,
                        " \"$USER\"), then log in again");
  }
  return MakeError(
      absl::StatusCode::kPermissionDenied, reason::kCredentials,
      absl::StrCat("no permission to connect to ", path, " as user id ", geteuid(), ": ", hint));
}

// connect(), nonblocking but for one wait: until the deadline, for a place in the listener's queue
// of connections. Sets errno, EAGAIN if there was none. The kernel wakes a process that waits for
// each place that becomes free. Another process may be faster and take it; then the wait goes on.
bool ConnectUntil(const FileDescriptor& socket, const sockaddr_un& address, absl::Time deadline) {
  // 0 would be no limit.
  const timeval limit = absl::ToTimeval(std::max(deadline - absl::Now(), absl::Microseconds(1)));
  const int flags = fcntl(socket.get(), F_GETFL);
  if (setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0 ||
      fcntl(socket.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
    return false;
  }
  const int result =
      connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  fcntl(socket.get(), F_SETFL, flags);
  errno = error;
  return result == 0;
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

absl::Status NoOpenFiles() {
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kOpenFiles,
                   absl::StrCat("process ", getpid(),
                                " has as many open files as its limit allows; close some, or raise "
                                "the limit (ulimit -n)"));
}

absl::Status CheckSpareDescriptors(const FileDescriptor& open, int count) {
  bool found = true;
  {
    std::vector<FileDescriptor> spare;
    for (int i = 0; found && i < count; ++i) {
      spare.emplace_back(fcntl(open.get(), F_DUPFD_CLOEXEC, 0));
      found = spare.back().get() >= 0;
    }
  }
  // They are closed again first: the report of the error may need one.
  return found ? absl::OkStatus() : NoOpenFiles();
}

int FileDescriptor::Release() { return std::exchange(fd_, -1); }

absl::Status OpenUnixSocket(int type, FileDescriptor* socket) {
  *socket = FileDescriptor(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket->get() >= 0) return absl::OkStatus();
  const int error = errno;
  if (error == EMFILE || error == ENFILE) return NoOpenFiles();
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                   absl::StrCat("no socket could be opened: ", ErrnoText(error),
                                "; free memory, or let the sandbox allow Unix sockets"));
}

absl::Status ConnectUnixSocket(const FileDescriptor& socket, const std::string& path, Absent absent,
                               absl::Time deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("socket path '", path, "' is empty or longer than ",
                                  sizeof(address.sun_path) - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const absl::Time start = absl::Now();
  absl::Duration pause = absl::Milliseconds(2);
  for (;;) {
    if (ConnectUntil(socket, address, deadline)) return absl::OkStatus();
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EACCES || error == EPERM) return NoPermission(path);
    if (error != ENOENT && error != ECONNREFUSED && error != EAGAIN) {
      return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonLost,
                       absl::StrCat("cannot connect to ", path, ": ", ErrnoText(error),
                                    "; check that GRADSYNC_SOCKET names gradsyncd's socket"));
    }
    if (error != EAGAIN && absent == Absent::kLost) {
      return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonLost,
                       absl::StrCat("the daemon was lost: nobody listens at ", path, " any more (",
                                    ErrnoText(error),
                                    "); start gradsyncd or look into its log, then join again"));
    }
    const absl::Time now = absl::Now();
    if (now >= deadline && error == EAGAIN) {
      return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonLost,
                       absl::StrCat("the daemon at ", path, " accepted no connection within ",
                                    DurationText(now - start),
                                    "; it is overloaded or stopped: look at its log"));
    }
    if (now >= deadline) {
      return MakeError(
          absl::StatusCode::kUnavailable, reason::kDaemonLost,
          absl::StrCat("no daemon at ", path, " within ", DurationText(now - start), " (",
                       ErrnoText(error),
                       "); start gradsyncd, or start the ranks with \"python -m gradsync.run\", or "
                       "check that GRADSYNC_SOCKET names gradsyncd's socket"));
    }
    // Nothing announces a daemon that starts, so poll.
    absl::SleepFor(std::min(pause, deadline - now));
    pause = std::min(pause * 2, absl::Milliseconds(200));
  }
}

}  // namespace gradsync::client
