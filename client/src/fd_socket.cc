#include "client/src/fd_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/src/error.h"
#include "gradsync/shared_memory.h"

namespace gradsync::client {
namespace {

// No answer carries more. The kernel truncates a hostile one (MSG_CTRUNC) without leaking
// descriptors.
constexpr std::size_t kMaxDescriptors = 4;

absl::Status Unavailable(const std::string& path, absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDaemonLost,
                   absl::StrCat("the daemon's descriptor socket ", path, " ", what,
                                "; check that gradsyncd runs"));
}

absl::Status Broken(const std::string& path, absl::string_view what) {
  return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                   absl::StrCat("the answer on ", path, " ", what,
                                "; check that gradsyncd and the client are of one release"));
}

// True when `socket` is ready for `events` (or has an error to report) before the deadline.
bool Await(const FileDescriptor& socket, short events, absl::Time deadline) {
  for (;;) {
    const std::int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    pollfd entry{socket.get(), events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (ready == 0 && absl::Now() >= deadline) return false;
  }
}

std::vector<FileDescriptor> TakeDescriptors(msghdr* message) {
  std::vector<FileDescriptor> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

}  // namespace

std::string FdSocketPath(absl::string_view socket) {
  return absl::StrCat(absl::StripSuffix(socket, ".sock"), "-fd.sock");
}

absl::StatusOr<std::vector<FileDescriptor>> FetchDescriptors(const std::string& path,
                                                             absl::string_view nonce,
                                                             std::size_t count,
                                                             absl::Time deadline) {
  FdRequest request;
  if (nonce.size() != sizeof(request.nonce)) {
    return Broken(path, absl::StrCat("has a nonce of ", nonce.size(), " bytes"));
  }
  std::memcpy(request.nonce, nonce.data(), nonce.size());

  FileDescriptor socket;
  if (auto status = OpenUnixSocket(SOCK_SEQPACKET, &socket); !status.ok()) return status;
  if (auto status = ConnectUnixSocket(socket, path, Absent::kLost, deadline); !status.ok()) {
    return status;
  }
  while (send(socket.get(), &request, sizeof(request), MSG_NOSIGNAL) != sizeof(request)) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || !Await(socket, POLLOUT, deadline)) {
      return Unavailable(path, "refuses the request");
    }
  }

  FdReply reply;
  std::memset(static_cast<void*>(&reply), 0, sizeof(reply));
  iovec buffer{&reply, sizeof(reply)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  msghdr message{};
  message.msg_iov = &buffer;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  // Looks before it reads: where Linux finds no message yet, and then that the other side has
  // closed, a read returns the end, although the message has come in between.
  if (!Await(socket, POLLIN, deadline)) return Unavailable(path, "does not answer");
  ssize_t received;
  while ((received = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno != EINTR) return Unavailable(path, "does not answer");
  }
  if (received == 0) return Unavailable(path, "hung up");
  std::vector<FileDescriptor> descriptors = TakeDescriptors(&message);
  if (received != sizeof(reply) || reply.magic != kFdMagic) {
    return Broken(path, "is malformed");
  }
  if (reply.status != 0) {
    reply.message[sizeof(reply.message) - 1] = '\0';
    return MakeError(static_cast<absl::StatusCode>(reply.status), reason::kProtocolViolation,
                     absl::StrCat("the daemon handed out no memory: ", reply.message));
  }
  if (reply.fd_count == count && count <= kMaxDescriptors && descriptors.size() < count &&
      (message.msg_flags & MSG_CTRUNC) != 0) {
    return NoOpenFiles();
  }
  if (reply.fd_count != count || descriptors.size() != count) {
    return Broken(path, absl::StrCat("brought ", descriptors.size(), " descriptors where ", count,
                                     " were due"));
  }
  return descriptors;
}

}  // namespace gradsync::client
