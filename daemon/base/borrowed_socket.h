// A connection whose descriptor belongs to gRPC, which closes it at a time of its own.

#ifndef DAEMON_BASE_BORROWED_SOCKET_H_
#define DAEMON_BASE_BORROWED_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace gradsync::daemon {

// A value. It knows the socket behind the descriptor, so it never takes a later socket with the
// same number for this one.
class BorrowedSocket {
 public:
  // Names no socket.
  BorrowedSocket() = default;
  // `descriptor` is open.
  explicit BorrowedSocket(int descriptor);

  // True if the descriptor still names this socket.
  bool IsOpen() const;
  // True if the other side has closed its end, or its half. False if the socket is closed.
  bool ClientHasClosed() const;
  // What has come and nobody has read; 0 if the socket is closed.
  std::size_t UnreadBytes() const;
  // What the other side of a TCP connection has sent so far; 0 if the socket is closed.
  std::uint64_t ReceivedBytes() const;
  // The address of this side. nullopt if the socket is closed.
  std::optional<sockaddr_storage> OwnAddress() const;
  // Ends the connection: its owner reads no more than it has read already. False if the socket is
  // closed, or if the process has no descriptor left for the moment that this takes.
  bool End() const;

 private:
  int descriptor_ = -1;
  ino_t socket_ = 0;  // 0: none
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_BORROWED_SOCKET_H_
