// Counts what the program's libraries read from sockets, because gRPC does not say how much it has
// read.

#ifndef DAEMON_BASE_READ_BYTES_H_
#define DAEMON_BASE_READ_BYTES_H_

#include <cstdint>

namespace gradsync::daemon {

// Returns how many bytes this process has read so far with recvmsg() from descriptors of this
// number. gRPC reads with nothing else. Thread-safe.
//
// The kernel counts only for TCP. So a program that links this function has a recvmsg() of its own,
// which gRPC's library uses, too.
std::uint64_t ReadBytes(int descriptor);

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_READ_BYTES_H_
