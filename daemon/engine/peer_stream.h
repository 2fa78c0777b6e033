// A connection between the engines of two nodes: TCP, or TLS over it.

#ifndef DAEMON_ENGINE_PEER_STREAM_H_
#define DAEMON_ENGINE_PEER_STREAM_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/peer_tls.h"

struct ssl_st;

namespace gradsync::daemon {

// Never blocks. Not thread-safe. Owns its descriptor.
class PeerStream {
 public:
  enum class Role : unsigned char { kConnects, kAccepts };

  PeerStream() = default;  // closed
  // `fd`: a connected, non-blocking socket. Null `tls`: clear text.
  PeerStream(UniqueFd fd, const PeerTls* tls, Role role);
  PeerStream(PeerStream&& other) noexcept;
  PeerStream& operator=(PeerStream&& other) noexcept;
  ~PeerStream() { Close(); }

  bool valid() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }
  void Close();
  // The kernel drops what it has not sent yet.
  void Reset();

  // True once both sides have shown their certificates. Call it each time the socket is ready,
  // until it returns true. Call Read() and Write() only after that.
  absl::StatusOr<bool> Handshake();

  // Each returns how many bytes it has taken, 0 if the socket is not ready. UNAVAILABLE: the
  // connection is broken, or the other side has closed it. A reader must read on until it gets 0:
  // poll() does not see what TLS has read already.
  absl::StatusOr<std::size_t> Read(void* to, std::size_t bytes);
  // `more`: more follows at once, so this part need not be sent alone. After 0, the same bytes must
  // be written again.
  absl::StatusOr<std::size_t> Write(const void* from, std::size_t bytes, bool more = false);

 private:
  absl::StatusOr<std::size_t> ResultOfTls(int result, const char* what) const;

  UniqueFd fd_;
  ssl_st* tls_ = nullptr;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_STREAM_H_
