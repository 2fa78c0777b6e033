#include "daemon/worker/lane_socket.h"

#include <sys/socket.h>

#include <cerrno>

#include "absl/status/status.h"
#include "daemon/base/passed_descriptors.h"

namespace gradsync::daemon {
namespace {

constexpr char kAnswer = 1;

// A longer message is cut, and then has another size than the one that is wanted.
ssize_t Receive(int fd, void* message, std::size_t bytes) {
  ssize_t size;
  do {
    size = recv(fd, message, bytes, MSG_TRUNC);
  } while (size < 0 && errno == EINTR);
  return size;
}

bool Send(int fd, const void* message, std::size_t bytes) {
  ssize_t size;
  do {
    size = send(fd, message, bytes, MSG_NOSIGNAL);
  } while (size < 0 && errno == EINTR);
  return size == static_cast<ssize_t>(bytes);
}

}  // namespace

absl::StatusOr<std::pair<LaneSocket, LaneSocket>> LaneSocket::Pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  for (const int end : ends) RefuseDescriptors(end);
  return std::make_pair(LaneSocket(UniqueFd(ends[0])), LaneSocket(UniqueFd(ends[1])));
}

bool LaneSocket::Ask(const ChunkRequest& request) const {
  char answer = 0;
  return Send(fd_.get(), &request, sizeof(request)) &&
         Receive(fd_.get(), &answer, sizeof(answer)) == sizeof(answer);
}

LaneSocket::Taken LaneSocket::Take(ChunkRequest* request) const {
  const ssize_t size = Receive(fd_.get(), request, sizeof(*request));
  if (size <= 0) return Taken::kEnd;
  return size == sizeof(*request) ? Taken::kRequest : Taken::kMalformed;
}

void LaneSocket::Answer() const { (void)Send(fd_.get(), &kAnswer, sizeof(kAnswer)); }

void LaneSocket::Shutdown() const { shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace gradsync::daemon
