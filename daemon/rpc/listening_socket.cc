#include "daemon/rpc/listening_socket.h"

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

}  // namespace

absl::StatusOr<ListeningSocket> ListeningSocket::Bind(const std::string& path, int type,
                                                      mode_t mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the socket path has ", path.size(),
                                                   " bytes; at most ", sizeof(address.sun_path) - 1,
                                                   " allowed: ", path));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const auto* const name = reinterpret_cast<const sockaddr*>(&address);

  struct stat existing {};
  if (lstat(path.c_str(), &existing) == 0) {
    if (!S_ISSOCK(existing.st_mode)) {
      return absl::FailedPreconditionError(absl::StrCat(path, " exists and is not a socket"));
    }
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
    unlink(path.c_str());
  }
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (bind(fd.get(), name, sizeof(address)) != 0) {
    if (errno == ENOENT) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the directory of ", path, " does not exist: create it (mode 0750), or pass --socket"));
    }
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
