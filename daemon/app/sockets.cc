#include "daemon/app/sockets.h"

#include <sys/socket.h>
#include <systemd/sd-daemon.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gradsync::daemon {
namespace {

std::string SidePath(const Options& options) {
  return absl::StrCat(absl::StripSuffix(options.socket, ".sock"), "-fd.sock");
}

}  // namespace

absl::StatusOr<Sockets> OpenSockets(const Options& options) {
  char** names = nullptr;
  const int passed = sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  int grpc_fd = -1, side_fd = -1;
  for (int i = 0; i < passed; ++i) {
    const std::string name = names[i];
    std::free(names[i]);
    (name == "fd" ? side_fd : grpc_fd) = SD_LISTEN_FDS_START + i;
  }
  std::free(names);
  if (passed > 0) {
    if (passed != 2 || grpc_fd < 0 || side_fd < 0 ||
        sd_is_socket(grpc_fd, AF_UNIX, SOCK_STREAM, 1) <= 0 ||
        sd_is_socket(side_fd, AF_UNIX, SOCK_SEQPACKET, 1) <= 0) {
      return absl::InvalidArgumentError(
          "LISTEN_FDS: expected two listening Unix sockets: a stream socket, named grpc in "
          "LISTEN_FDNAMES, and a seqpacket socket, named fd; correct gradsyncd's socket units");
    }
    return Sockets{ListeningSocket::Adopt(grpc_fd), ListeningSocket::Adopt(side_fd)};
  }
  auto grpc_socket = ListeningSocket::Bind(options.socket, SOCK_STREAM, options.socket_mode);
  if (!grpc_socket.ok()) return grpc_socket.status();
  auto fd_socket = ListeningSocket::Bind(SidePath(options), SOCK_SEQPACKET, options.socket_mode);
  if (!fd_socket.ok()) return fd_socket.status();
  return Sockets{*std::move(grpc_socket), *std::move(fd_socket)};
}

absl::Status CheckSockets(const Options& options) {
  for (const std::string& path : {options.socket, SidePath(options)}) {
    if (absl::Status status = ListeningSocket::CheckPath(path); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
