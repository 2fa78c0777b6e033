// Follows what the program's libraries read from sockets: gRPC says little about it.
//
// A program that links this file has a recvmsg() of its own, which gRPC's library uses, too. gRPC
// reads with nothing else. Thread-safe.

#ifndef DAEMON_BASE_READ_BYTES_H_
#define DAEMON_BASE_READ_BYTES_H_

#include <sys/types.h>

#include <cstdint>

#include "daemon/base/header_frames.h"

namespace gradsync::daemon {

// Returns how many bytes this process has read so far from descriptors of this number. The kernel
// has such a count for TCP alone.
std::uint64_t ReadBytes(int descriptor);

// Applies the limits of HeaderFrames to an HTTP/2 connection. Counts resets anew every second. If
// what a read brings exceeds a limit, the connection ends, and the read returns its end instead.
// Called before the first read. `socket`: the number that fstat() gives for the descriptor's socket
// (st_ino); not 0. A later socket with the same descriptor has no limit. `frames`: it has taken no
// bytes yet.
void LimitHeaders(int descriptor, ino_t socket, const HeaderFrames& frames);

struct HeaderState {
  std::uint32_t unfinished = 0;  // bytes of headers whose end has not come
  bool refused = false;          // a limit of LimitHeaders() was exceeded: the connection has ended
};
// Returns the state of this socket. `refused` stays true after the socket is closed. It is
// forgotten when a later socket with the same descriptor is refused.
HeaderState HeadersOf(int descriptor, ino_t socket);

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_READ_BYTES_H_
