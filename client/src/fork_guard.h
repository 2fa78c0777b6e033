// Keeps a trainer's forked children away from its session. A child inherits the session's socket.
// If the socket stayed open in the child, the trainer's death would not end the stream. A child
// also inherits gRPC's locks without gRPC's threads, so no code of a session may run there.
//
// Once a process has guarded a socket, fork(2) closes the child's copies of all guarded sockets
// before it returns in the child. In the child InForkedChild() is then true forever.

#ifndef CLIENT_SRC_FORK_GUARD_H_
#define CLIENT_SRC_FORK_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::client {

bool InForkedChild();
// FAILED_PRECONDITION, reason FORKED.
absl::Status ForkedError();

// Guards one open socket, which it does not own. Movable, not copyable.
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

// A reference to an object with locks and threads. Only the process that made the object may
// destroy it: in a forked child, the destructor leaks the reference.
template <typename T>
class ParentsReference {
 public:
  explicit ParentsReference(std::shared_ptr<T> reference)
      : reference_(std::make_unique<std::shared_ptr<T>>(std::move(reference))) {}
  ~ParentsReference() {
    if (InForkedChild()) static_cast<void>(reference_.release());
  }
  ParentsReference(const ParentsReference&) = delete;
  ParentsReference& operator=(const ParentsReference&) = delete;

  T* operator->() const { return reference_->get(); }
  const std::shared_ptr<T>& get() const { return *reference_; }

 private:
  // On the heap, so that leaking it allocates nothing.
  std::unique_ptr<std::shared_ptr<T>> reference_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_FORK_GUARD_H_
