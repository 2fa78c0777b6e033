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
#include <memory>
#include <utility>

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

// A reference to something with locks and threads, which only the process that made them may take
// down: destroyed in a forked child, it leaks.
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
  // On the heap, so that leaking allocates nothing.
  std::unique_ptr<std::shared_ptr<T>> reference_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_FORK_GUARD_H_
