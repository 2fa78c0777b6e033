#include "daemon/rpc/listening_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

constexpr int kBacklog = 4096;

// True if there is a socket at `path`, of a live or a lost daemon; false if there is nothing.
absl::StatusOr<bool> FindSocket(const std::string& path) {
  constexpr std::size_t kRoom = sizeof(sockaddr_un::sun_path);
  if (path.size() >= kRoom) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the socket path has ", path.size(), " bytes; at most ", kRoom - 1, " allowed: ", path));
  }
  struct stat existing {};
  if (lstat(path.c_str(), &existing) != 0) return false;
  if (S_ISSOCK(existing.st_mode)) return true;
  return absl::FailedPreconditionError(
      absl::StrCat(path, " exists and is not a socket: remove it, or pass another --socket"));
}

// Whether this process may make and remove files beside `path`.
absl::Status CheckDirectory(const std::string& path) {
  const std::string directory = path.substr(0, path.rfind('/') + 1);
  const char* const where = directory.empty() ? "." : directory.c_str();
  // AT_EACCESS: with its capabilities, too.
  if (faccessat(AT_FDCWD, where, W_OK | X_OK, AT_EACCESS) == 0) return absl::OkStatus();
  if (errno == ENOENT) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the directory of ", path, " does not exist: create it (mode 0750), or pass --socket"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("cannot make a socket in ", directory, " (", std::strerror(errno),
                   "): let the daemon's user write there, or pass --socket"));
}

}  // namespace

absl::Status ListeningSocket::CheckPath(const std::string& path) {
  const auto found = FindSocket(path);
  return found.ok() ? CheckDirectory(path) : found.status();
}

absl::StatusOr<ListeningSocket> ListeningSocket::Bind(const std::string& path, int type,
                                                      mode_t mode) {
  const auto found = FindSocket(path);
  if (!found.ok()) return found.status();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const auto* const name = reinterpret_cast<const sockaddr*>(&address);

  if (*found) {
    // The socket is stale only if it refuses the connection. A live one may also have a full queue
    // (EAGAIN; a blocking connect would wait forever) or another type (EPROTOTYPE).
    const UniqueFd probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const bool connected = connect(probe.get(), name, sizeof(address)) == 0;
    if (connected || errno == EAGAIN || errno == EPROTOTYPE) {
      return absl::FailedPreconditionError(
          absl::StrCat("another daemon listens on ", path, "; stop it or pass another --socket"));
    }
    if (errno != ECONNREFUSED) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot find out whether a daemon listens on ", path, " (",
                       std::strerror(errno), "); remove it or pass another --socket"));
    }
  }
  if (absl::Status status = CheckDirectory(path); !status.ok()) return status;
  if (*found) unlink(path.c_str());
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (bind(fd.get(), name, sizeof(address)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("bind ", path));
  }
  ListeningSocket listening(std::move(fd), path);
  // Nobody can connect before chmod, because the socket does not listen yet.
  if (chmod(path.c_str(), mode) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("chmod ", path));
  if (listen(listening.fd(), kBacklog) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("listen on ", path));
  }
  return listening;
}

ListeningSocket::~ListeningSocket() {
  if (fd_.valid() && !path_.empty()) unlink(path_.c_str());
}

}  // namespace gradsync::daemon
