// The anonymous files that the daemon shares with trainers.

#ifndef DAEMON_ARENA_SEALED_MEMORY_H_
#define DAEMON_ARENA_SEALED_MEMORY_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync {

// A memfd of a fixed size: whoever holds a descriptor of it can neither shrink nor grow it, so a
// mapping of it never faults with SIGBUS, nor add a seal. What seals do not stop is a hole: the
// content of a page can be given back (fallocate) and reads as zero afterwards.
//
// Owns the descriptor, which is closed on exec. Move-only; const methods are thread-safe.
class SealedMemory {
 public:
  // `bytes` is rounded up to whole pages and is one page at least. No page is touched: the memory
  // belongs to whoever touches it first. `name` shows in /proc/PID/maps, cut to what the kernel
  // takes. INVALID_ARGUMENT for a size that no file has; otherwise the kernel's error,
  // RESOURCE_EXHAUSTED if out of descriptors.
  static absl::StatusOr<SealedMemory> Create(const std::string& name, std::size_t bytes);

  SealedMemory(SealedMemory&& other) noexcept;
  SealedMemory& operator=(SealedMemory&& other) noexcept;
  ~SealedMemory();

  int fd() const { return fd_; }
  std::size_t bytes() const { return bytes_; }

 private:
  SealedMemory(int fd, std::size_t bytes) : fd_(fd), bytes_(bytes) {}

  int fd_;  // -1 after a move
  std::size_t bytes_;
};

}  // namespace gradsync

#endif  // DAEMON_ARENA_SEALED_MEMORY_H_
