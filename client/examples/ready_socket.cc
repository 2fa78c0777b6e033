#include "client/examples/ready_socket.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gradsync::examples {

absl::StatusOr<std::unique_ptr<ReadySocket>> ReadySocket::Create(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("too long for a socket: ", path));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0 ||
      bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const absl::Status status =
        absl::UnavailableError(absl::StrCat("cannot listen on ", path, ": ", std::strerror(errno)));
    if (descriptor >= 0) close(descriptor);
    return status;
  }
  return std::unique_ptr<ReadySocket>(new ReadySocket(descriptor));
}

ReadySocket::~ReadySocket() { close(descriptor_); }

bool ReadySocket::ReadReady() {
  std::array<char, 4096> datagram;
  bool ready = false;
  for (ssize_t count; (count = recv(descriptor_, datagram.data(), datagram.size(), 0)) > 0;) {
    const absl::string_view text(datagram.data(), static_cast<std::size_t>(count));
    for (absl::string_view line : absl::StrSplit(text, '\n')) ready |= line == "READY=1";
  }
  return ready;
}

}  // namespace gradsync::examples
