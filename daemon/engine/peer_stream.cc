#include "daemon/engine/peer_stream.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

// SSL_read and SSL_write take an int.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

absl::Status Broken(const char* how) {
  return absl::UnavailableError(absl::StrCat("its connection: ", how));
}

absl::Status Closed() { return absl::UnavailableError("its connection was closed"); }

bool NotReady(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

PeerStream::PeerStream(UniqueFd fd, const PeerTls* tls, Role role) : fd_(std::move(fd)) {
  if (tls == nullptr) return;
  tls_ = SSL_new(tls->context());
  SSL_set_fd(tls_, fd_.get());
  if (role == Role::kConnects) {
    SSL_set_connect_state(tls_);
  } else {
    SSL_set_accept_state(tls_);
  }
}

PeerStream::PeerStream(PeerStream&& other) noexcept
    : fd_(std::move(other.fd_)), tls_(std::exchange(other.tls_, nullptr)) {}

PeerStream& PeerStream::operator=(PeerStream&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::move(other.fd_);
    tls_ = std::exchange(other.tls_, nullptr);
  }
  return *this;
}

void PeerStream::Close() {
  if (tls_ != nullptr) SSL_free(std::exchange(tls_, nullptr));
  fd_.reset();
}

void PeerStream::Reset() {
  const linger now = {1, 0};
  if (valid()) setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  Close();
}

absl::StatusOr<bool> PeerStream::Handshake() {
  if (tls_ == nullptr) return true;
  ERR_clear_error();
  const int result = SSL_do_handshake(tls_);
  if (result == 1) return true;
  const absl::StatusOr<std::size_t> went = ResultOfTls(result, "TLS");
  if (!went.ok()) return went.status();
  return false;
}

absl::StatusOr<std::size_t> PeerStream::ResultOfTls(int result, const char* what) const {
  const int system = errno;
  switch (SSL_get_error(tls_, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return std::size_t{0};
    case SSL_ERROR_ZERO_RETURN:
      return Closed();
    case SSL_ERROR_SYSCALL:
      return system == 0 ? Closed() : Broken(std::strerror(system));
    default:
      break;
  }
  const unsigned long error = ERR_get_error();  // NOLINT(google-runtime-int): OpenSSL's type
  const char* const reason = ERR_reason_error_string(error);
  ERR_clear_error();
  return absl::UnavailableError(
      absl::StrCat("its connection: ", what, ": ", reason != nullptr ? reason : "broken"));
}

absl::StatusOr<std::size_t> PeerStream::Read(void* to, std::size_t bytes) {
  if (tls_ != nullptr) {
    ERR_clear_error();
    errno = 0;
    const int got = SSL_read(tls_, to, static_cast<int>(std::min(bytes, kMostBytes)));
    if (got > 0) return static_cast<std::size_t>(got);
    return ResultOfTls(got, "TLS");
  }
  for (;;) {
    const ssize_t got = recv(fd_.get(), to, bytes, MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) return Closed();
    if (NotReady(errno)) return std::size_t{0};
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

absl::StatusOr<std::size_t> PeerStream::Write(const void* from, std::size_t bytes, bool more) {
  if (tls_ != nullptr) {
    ERR_clear_error();
    errno = 0;
    const int sent = SSL_write(tls_, from, static_cast<int>(std::min(bytes, kMostBytes)));
    if (sent > 0) return static_cast<std::size_t>(sent);
    return ResultOfTls(sent, "TLS");
  }
  for (;;) {
    const ssize_t sent =
        send(fd_.get(), from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (NotReady(errno)) return std::size_t{0};
    if (errno != EINTR) return Broken(std::strerror(errno));
  }
}

}  // namespace gradsync::daemon
