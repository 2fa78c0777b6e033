// A connection whose descriptor belongs to gRPC, which may close it at any time.

#ifndef DAEMON_BASE_BORROWED_SOCKET_H_
#define DAEMON_BASE_BORROWED_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "daemon/base/header_frames.h"
#include "daemon/base/read_bytes.h"

namespace gradsync::daemon {

// A value. It remembers the socket, not only the descriptor's number. So it never mistakes a later
// socket with that number for this one, except in ReadBytes().
class BorrowedSocket {
 public:
  // Names no socket.
  BorrowedSocket() = default;
  // `descriptor` is open.
  explicit BorrowedSocket(int descriptor);

  // True if the descriptor still names this socket.
  bool IsOpen() const;
  // True if the other side has closed the connection, or its own direction. False if the socket is
  // closed.
  bool ClientHasClosed() const;
  // The bytes that have arrived and that nobody has read; 0 if the socket is closed.
  std::size_t UnreadBytes() const;
  // True if the other side leaves so much unread that this side should not send now. False if the
  // socket is closed.
  bool IsFull() const;
  // The bytes that were read from the descriptor since this object was made: see read_bytes.h.
  // After the socket is closed, bytes of a later socket with the same descriptor count, too. Takes
  // no system call.
  std::uint64_t ReadBytes() const;
  // LimitHeaders() limits an HTTP/2 connection: see read_bytes.h. It is called before the owner
  // reads the connection. Headers() says how much of its headers has come.
  void LimitHeaders(const HeaderFrames& frames) const;
  HeaderState Headers() const;
  // The bytes that this side of a TCP connection has received so far; 0 if the socket is closed.
  std::uint64_t ReceivedBytes() const;
  // The address of this side. nullopt if the socket is closed.
  std::optional<sockaddr_storage> OwnAddress() const;
  // Ends the connection: its owner reads nothing more. False if the socket is closed. Needs no free
  // descriptor: the process keeps a spare one.
  bool End() const;

 private:
  int descriptor_ = -1;
  ino_t socket_ = 0;                 // 0: none
  std::uint64_t read_at_first_ = 0;  // ReadBytes() of the number when this object was made
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_BORROWED_SOCKET_H_
