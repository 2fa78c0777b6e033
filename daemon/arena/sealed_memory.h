// The anonymous files that the daemon shares with trainers.

#ifndef DAEMON_ARENA_SEALED_MEMORY_H_
#define DAEMON_ARENA_SEALED_MEMORY_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace gradsync::daemon {

// A memfd of a fixed size. Holders of a descriptor cannot shrink it, grow it or add a seal. So a
// mapping of it never faults with SIGBUS. Seals do not prevent holes: a holder can free a page
// (fallocate), which then reads as zero.
//
// Owns the descriptor, which is closed on exec. Move-only; const methods are thread-safe.
class SealedMemory {
 public:
  // `bytes` is rounded up to whole pages, at least one. Touches no page: the first process that
  // touches a page is charged for it. `name` shows in /proc/PID/maps, truncated to the kernel's
  // limit. INVALID_ARGUMENT if no file can have this size. Otherwise the kernel's error, for
  // example RESOURCE_EXHAUSTED if there is no free descriptor.
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

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_SEALED_MEMORY_H_
