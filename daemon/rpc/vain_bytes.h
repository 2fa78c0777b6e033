// The bytes that gRPC has read of a connection in vain.

#ifndef DAEMON_RPC_VAIN_BYTES_H_
#define DAEMON_RPC_VAIN_BYTES_H_

#include <cstdint>

#include "daemon/base/borrowed_socket.h"
#include "daemon/rpc/client_input.h"

namespace gradsync::daemon {

// Bytes are read in vain if no thread of the daemon gets a call or a message from them. gRPC may
// keep such bytes in memory without a limit: headers, for example, until the last of them has come.
// Not thread-safe.
class VainBytes {
 public:
  // What the owner of a client's connections allows.
  struct Most {
    std::uint64_t one = 0;   // of a connection
    std::uint64_t all = 0;   // of all connections of the client
    std::uint64_t some = 0;  // if the sum exceeds `all`, each connection with more than this ends
  };
  // How many bytes may come with each call or message beside its own: frames, headers, TLS,
  // acknowledgements. An honest client sends fewer.
  static constexpr std::uint64_t kAround = 256;
  // A look at fewer takes no system call.
  static constexpr std::uint64_t kMany = 64 << 10;

  // Looks at the connection. Returns how many bytes have been read in vain. Later calls and
  // messages make up for earlier bytes. If there are kMany or more, it asks whether the
  // connection is open, and returns 0 if not.
  std::uint64_t Look(const BorrowedSocket& socket, const ClientInput& input) {
    // In this order: a message is read before it is used.
    const std::uint64_t used = input.bytes.load() + input.received.load() * kAround;
    const std::uint64_t read = socket.ReadBytes();
    const std::uint64_t more = bytes_ + (read - read_);
    const std::uint64_t less = used - used_;
    bytes_ = more > less ? more - less : 0;
    read_ = read;
    used_ = used;
    // The bytes may be those of a later socket with the same number.
    if (bytes_ >= kMany && !socket.IsOpen()) bytes_ = 0;
    return bytes_;
  }
  // Begins to count anew.
  void Forget() { bytes_ = 0; }
  // True if the connection is to end. `all`: the sum over the client's connections.
  bool AreMany(const Most& most, std::uint64_t all) const {
    return bytes_ > most.one || (all > most.all && bytes_ > most.some);
  }

 private:
  std::uint64_t bytes_ = 0;
  std::uint64_t read_ = 0;  // at the last look
  std::uint64_t used_ = 0;  // at the last look
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_VAIN_BYTES_H_
