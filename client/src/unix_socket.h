// Unix sockets that the client connects itself, so that it owns every descriptor that fork(2) would
// hand to a child.

#ifndef CLIENT_SRC_UNIX_SOCKET_H_
#define CLIENT_SRC_UNIX_SOCKET_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace gradsync::client {

// One open descriptor, closed with the object.
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

// A new socket of `type` (SOCK_STREAM, SOCK_SEQPACKET), close-on-exec, non-blocking, not connected.
absl::Status OpenUnixSocket(int type, FileDescriptor* socket);

// What it means that nobody listens: a daemon that is not there yet, or one that has gone.
enum class Absent : std::uint8_t { kNotYet, kGone };

// Connects to `path`, retrying until the deadline while nobody is there yet, or too many connect.
//   INVALID_ARGUMENT   the path is too long.
//   PERMISSION_DENIED  at once; says whose socket it is.
//   UNAVAILABLE        nobody listened until the deadline, or any more.
absl::Status ConnectUnixSocket(const FileDescriptor& socket, const std::string& path, Absent absent,
                               absl::Time deadline);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_UNIX_SOCKET_H_
