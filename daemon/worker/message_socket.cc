#include "daemon/worker/message_socket.h"

#include <errno.h>
#include <sys/socket.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "daemon/base/passed_descriptors.h"

namespace gradsync::daemon {
namespace {

// The most descriptors that Linux passes with one message (SCM_MAX_FD). With room for all, none is
// left to the kernel, which would close it in recvmsg().
constexpr std::size_t kMostPassed = 253;

constexpr std::size_t kControlBytes = CMSG_SPACE(MessageSocket::kMaxDescriptors * sizeof(int));

std::vector<UniqueFd> DescriptorsOf(msghdr* header) {
  std::vector<UniqueFd> descriptors;
  for (cmsghdr* part = CMSG_FIRSTHDR(header); part != nullptr; part = CMSG_NXTHDR(header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

struct Taken {
  ssize_t size = -1;
  int error = 0;  // if size < 0
  bool cut = false;
  std::vector<UniqueFd> descriptors;
};

// Reads a message into `bytes`. Its descriptors have an owner at once, also those of a message that
// is empty or cut.
Taken Take(int fd, std::string* bytes, int flags) {
  iovec part{bytes->data(), bytes->size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostPassed * sizeof(int))];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  Taken taken;
  do {
    taken.size = recvmsg(fd, &header, flags | MSG_CMSG_CLOEXEC);
  } while (taken.size < 0 && errno == EINTR);
  if (taken.size < 0) {
    taken.error = errno;
    return taken;  // `control` holds what was on the stack before
  }
  taken.cut = (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  taken.descriptors = DescriptorsOf(&header);
  return taken;
}

}  // namespace

absl::StatusOr<std::pair<MessageSocket, MessageSocket>> MessageSocket::Pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  return std::make_pair(MessageSocket(UniqueFd(ends[0])), MessageSocket(UniqueFd(ends[1])));
}

void MessageSocket::ExpectNoDescriptors() const { RefuseDescriptors(fd_.get()); }

absl::Status MessageSocket::Send(const google::protobuf::MessageLite& message,
                                 absl::Span<const int> descriptors, Wait wait) const {
  std::string bytes = message.SerializeAsString();
  if (bytes.size() > kMaxMessageBytes || descriptors.size() > kMaxDescriptors) {
    return absl::InvalidArgumentError(absl::StrCat("a message of ", bytes.size(), " bytes and ",
                                                   descriptors.size(),
                                                   " descriptors is too large"));
  }
  iovec part{bytes.data(), bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[kControlBytes] = {};
  if (!descriptors.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size() * sizeof(int));
  }
  const int flags = MSG_NOSIGNAL | (wait == Wait::kNo ? MSG_DONTWAIT : 0);
  ssize_t sent;
  do {
    sent = sendmsg(fd_.get(), &header, flags);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return absl::OkStatus();
  if (errno == EAGAIN) return absl::ResourceExhaustedError("the other end's queue is full");
  if (errno == EPIPE || errno == ECONNRESET) {
    return absl::UnavailableError("the other end is closed");
  }
  return absl::ErrnoToStatus(errno, "sendmsg");
}

absl::StatusOr<MessageSocket::Received> MessageSocket::Receive() const {
  Received received;
  received.bytes.resize(kMaxMessageBytes);
  Taken taken = Take(fd_.get(), &received.bytes, 0);
  if (taken.size == 0) {
    // Where Linux finds no message yet, and then that the other end is closed, it returns the end,
    // although a last message has come in between. A second look finds that message.
    CloseAtOnce(std::move(taken.descriptors));
    taken = Take(fd_.get(), &received.bytes, MSG_DONTWAIT);
  }
  if (taken.size < 0 && taken.error != ECONNRESET) {
    return absl::ErrnoToStatus(taken.error, "recvmsg");
  }
  // No bytes mean the end: every message has at least an id.
  received.end = taken.size <= 0;
  const bool too_large = taken.cut || taken.descriptors.size() > kMaxDescriptors;
  if (received.end || too_large) CloseAtOnce(std::exchange(taken.descriptors, {}));
  if (too_large) return absl::InternalError("a message was cut, or has too many descriptors");
  received.bytes.resize(taken.size > 0 ? static_cast<std::size_t>(taken.size) : 0);
  received.descriptors = std::move(taken.descriptors);
  return received;
}

}  // namespace gradsync::daemon
