// Keeps a trainer's forked children away from its session. A child inherits the session's socket;
// were it left open, the trainer's death would not end the stream. It also inherits gRPC's locks
// without gRPC's threads, so nothing of a session may run there.
//
// After fork(2) in a process that ever guarded a socket, the child's copies of all guarded sockets
// are closed before fork returns, and InForkedChild() is true there for good.

#ifndef CLIENT_SRC_FORK_GUARD_H_
#define CLIENT_SRC_FORK_GUARD_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::client {

bool InForkedChild();
// FAILED_PRECONDITION, reason FORKED.
absl::Status ForkedError();

// Guards one open socket, which stays its owner's. Not copyable, movable.
class GuardedSocket {
 public:
  // RESOURCE_EXHAUSTED if the process has 1024 guarded sockets already.
  static absl::StatusOr<GuardedSocket> Guard(int fd);

  GuardedSocket() = default;
  GuardedSocket(GuardedSocket&& other) noexcept;
  GuardedSocket& operator=(GuardedSocket&& other) noexcept;
  ~GuardedSocket();

 private:
  explicit GuardedSocket(std::size_t slot) : slot_(slot) {}

  static constexpr std::size_t kNone = SIZE_MAX;
  std::size_t slot_ = kNone;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_FORK_GUARD_H_
