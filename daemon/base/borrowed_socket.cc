#include "daemon/base/borrowed_socket.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <memory>

#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

// More than a Unix socket holds, so that one call takes all of it. A TCP socket may hold more.
constexpr std::size_t kDropBytes = std::size_t{1} << 20;
constexpr int kMostDrops = 64;

// The number of the socket that the descriptor names; 0: none.
ino_t SocketOf(int descriptor) {
  struct stat named {};
  return fstat(descriptor, &named) == 0 && S_ISSOCK(named.st_mode) ? named.st_ino : 0;
}

// Takes what has come and nobody has read. Otherwise the owner still reads it.
void Drop(int socket) {
  const std::unique_ptr<char[]> dropped(new char[kDropBytes]);  // not zeroed: pages come with use
  for (int i = 0; i < kMostDrops; ++i) {
    // TCP copies nothing with MSG_TRUNC.
    if (recv(socket, dropped.get(), kDropBytes, MSG_DONTWAIT | MSG_TRUNC) <= 0) return;
  }
}

// Ends the connection if the descriptor names this socket. The caller owns the descriptor.
bool EndIfIs(int descriptor, ino_t socket) {
  if (SocketOf(descriptor) != socket) return false;
  shutdown(descriptor, SHUT_RDWR);
  Drop(descriptor);
  return true;
}

// A descriptor that names a socket for a moment, when the process has no free one. Thread-safe.
class SpareDescriptor {
 public:
  // Opens it at the first call.
  static SpareDescriptor& OfProcess() {
    static auto* const spare = new SpareDescriptor;  // for threads that outlive main
    return *spare;
  }

  // As EndIfIs(), with a copy of the descriptor. False, too, if none was free for the spare one
  // when it was opened.
  bool EndIfIs(int descriptor, ino_t socket) {
    MutexLock lock(&mutex_);
    if (dup3(descriptor, spare_.get(), O_CLOEXEC) < 0) return false;
    const bool ended = daemon::EndIfIs(spare_.get(), socket);
    dup3(unused_.get(), spare_.get(), O_CLOEXEC);  // closes the copy
    return ended;
  }

 private:
  SpareDescriptor() = default;

  Mutex mutex_;  // held while spare_ names a socket
  // Both are always open, so dup3() only replaces what spare_ names. That needs no free descriptor.
  const UniqueFd unused_{eventfd(0, EFD_CLOEXEC)};
  const UniqueFd spare_{fcntl(unused_.get(), F_DUPFD_CLOEXEC, 0)};
};

}  // namespace

BorrowedSocket::BorrowedSocket(int descriptor)
    : descriptor_(descriptor),
      socket_(SocketOf(descriptor)),
      read_at_first_(daemon::ReadBytes(descriptor)) {
  SpareDescriptor::OfProcess();  // opened before connections use up all
}

bool BorrowedSocket::IsOpen() const { return socket_ != 0 && SocketOf(descriptor_) == socket_; }

bool BorrowedSocket::ClientHasClosed() const {
  pollfd events{descriptor_, POLLRDHUP, 0};
  return IsOpen() && poll(&events, 1, /*timeout=*/0) == 1 &&
         (events.revents & (POLLRDHUP | POLLHUP)) != 0;
}

std::size_t BorrowedSocket::UnreadBytes() const {
  int unread = 0;
  // If it is still open afterwards, the bytes are its own. Mostly there are none.
  return ioctl(descriptor_, FIONREAD, &unread) == 0 && unread > 0 && IsOpen()
             ? static_cast<std::size_t>(unread)
             : 0;
}

bool BorrowedSocket::IsFull() const {
  // A Unix socket can be written to again once a quarter of its buffer is left unread.
  pollfd events{descriptor_, POLLOUT, 0};
  return IsOpen() && poll(&events, 1, /*timeout=*/0) == 0;
}

std::uint64_t BorrowedSocket::ReadBytes() const {
  return daemon::ReadBytes(descriptor_) - read_at_first_;
}

void BorrowedSocket::LimitHeaders(const HeaderFrames& frames) const {
  if (socket_ != 0) daemon::LimitHeaders(descriptor_, socket_, frames);
}

HeaderState BorrowedSocket::Headers() const { return HeadersOf(descriptor_, socket_); }

std::uint64_t BorrowedSocket::ReceivedBytes() const {
  tcp_info info{};
  socklen_t size = sizeof(info);
  // If it is still open afterwards, the number is its own.
  return getsockopt(descriptor_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && IsOpen()
             ? info.tcpi_bytes_received
             : 0;
}

std::optional<sockaddr_storage> BorrowedSocket::OwnAddress() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  // If it is still open afterwards, the address is its own.
  if (getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) != 0 || !IsOpen()) {
    return std::nullopt;
  }
  return address;
}

bool BorrowedSocket::End() const {
  if (socket_ == 0) return false;
  // The copy names one socket from now on, whatever its owner does.
  const UniqueFd copy(fcntl(descriptor_, F_DUPFD_CLOEXEC, 0));
  if (copy.valid()) return EndIfIs(copy.get(), socket_);
  return errno == EMFILE && SpareDescriptor::OfProcess().EndIfIs(descriptor_, socket_);
}

}  // namespace gradsync::daemon
