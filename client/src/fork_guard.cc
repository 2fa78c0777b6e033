#include "client/src/fork_guard.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/error.h"

namespace gradsync::client {
namespace {

// The child's handler reads it, and may do only what is async-signal-safe: no locks, no allocation.
struct Slot {
  std::atomic<bool> taken{false};
  std::atomic<int> fd{-1};
  // The socket's inode. gRPC may close the socket at any time after the daemon's end, and then its
  // number may belong to another file.
  std::atomic<std::uint64_t> inode{0};
};

std::array<Slot, 1024> slots;
std::atomic<bool> in_child{false};

void CloseInChild() {
  const int saved = errno;
  in_child.store(true, std::memory_order_relaxed);
  for (Slot& slot : slots) {
    const int fd = slot.fd.load(std::memory_order_acquire);
    struct stat status;
    if (fd >= 0 && fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) &&
        status.st_ino == slot.inode.load(std::memory_order_relaxed)) {
      close(fd);
    }
  }
  errno = saved;
}

}  // namespace

bool InForkedChild() { return in_child.load(std::memory_order_relaxed); }

absl::Status ForkedError() {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kForked,
      absl::StrCat("process ", getpid(),
                   " was forked from a trainer that had joined, and cannot use its "
                   "session. To join from a child process, start a new program (spawn)."));
}

absl::StatusOr<GuardedSocket> GuardedSocket::Guard(int fd) {
  static const int registered = pthread_atfork(nullptr, nullptr, &CloseInChild);
  struct stat status;
  if (registered != 0 || fstat(fd, &status) != 0) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                     "a handler for fork(2) could not be registered; free memory");
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].taken.exchange(true)) continue;
    slots[i].inode.store(status.st_ino, std::memory_order_relaxed);
    slots[i].fd.store(fd, std::memory_order_release);
    return GuardedSocket(i);
  }
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                   absl::StrCat("more than ", slots.size(),
                                " sessions in one process; destroy sessions that are not used"));
}

GuardedSocket::GuardedSocket(GuardedSocket&& other) noexcept
    : slot_(std::exchange(other.slot_, kNone)) {}

GuardedSocket& GuardedSocket::operator=(GuardedSocket&& other) noexcept {
  std::swap(slot_, other.slot_);
  return *this;
}

GuardedSocket::~GuardedSocket() {
  if (slot_ == kNone) return;
  slots[slot_].fd.store(-1, std::memory_order_release);
  slots[slot_].taken.store(false, std::memory_order_release);
}

}  // namespace gradsync::client
