// Unix sockets that the client, not gRPC, connects, so that the client owns every descriptor that a
// forked child inherits.

#ifndef CLIENT_SRC_UNIX_SOCKET_H_
#define CLIENT_SRC_UNIX_SOCKET_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace gradsync::client {

// Owns one open descriptor and closes it.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  int get() const { return fd_; }
  int Release();

 private:
  int fd_ = -1;
};

// RESOURCE_EXHAUSTED OPEN_FILES: names this process.
absl::Status NoOpenFiles();
// NoOpenFiles() if this process cannot open `count` more descriptors. `open`: any open descriptor.
absl::Status CheckSpareDescriptors(const FileDescriptor& open, int count);

// A new socket of `type` (SOCK_STREAM, SOCK_SEQPACKET), close-on-exec, non-blocking, not connected.
absl::Status OpenUnixSocket(int type, FileDescriptor* socket);

// Why nobody listens: the daemon has not started yet, or it was lost.
enum class Absent : std::uint8_t { kNotYet, kLost };

// Connects to `path`. With kNotYet, retries until the deadline while nobody listens. While too many
// processes connect at once, waits until the deadline for a place.
//   INVALID_ARGUMENT   MALFORMED: the path is too long.
//   PERMISSION_DENIED  CREDENTIALS: not retried; the message names the group of the socket or
//                      of its folder.
//   UNAVAILABLE        DAEMON_LOST: until the deadline nobody listened, or the daemon accepted no
//                      connection. With kLost, nobody listened when it was called.
absl::Status ConnectUnixSocket(const FileDescriptor& socket, const std::string& path, Absent absent,
                               absl::Time deadline);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_UNIX_SOCKET_H_
