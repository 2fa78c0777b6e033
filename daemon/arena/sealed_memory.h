// The anonymous files that the daemon shares with trainers.

#ifndef DAEMON_ARENA_SEALED_MEMORY_H_
#define DAEMON_ARENA_SEALED_MEMORY_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gradsync::daemon {

// A memfd of a fixed size. Holders of a descriptor cannot shrink it or grow it. So a mapping of it
// never faults with SIGBUS. Until a holder seals the pages (F_SEAL_FUTURE_WRITE, F_SEAL_SEAL), any
// holder can free a page (punch a hole), which then reads as zero.
//
// Owns the descriptor, which is closed on exec. Move-only; const methods are thread-safe.
class SealedMemory {
 public:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;  // x86-64

  // `bytes` is rounded up to whole pages, at least one. Above kHugePage it is rounded up to whole
  // huge pages: if a huge page reached beyond the end, its part behind the end would count as
  // allocated. Touches no page: the first process that touches a page is charged for it. `name`
  // shows in /proc/PID/maps, truncated to the kernel's limit. INVALID_ARGUMENT if no file can have
  // this size. RESOURCE_EXHAUSTED OPEN_FILES: there is no free descriptor. RESOURCE_EXHAUSTED
  // MEMORY: the kernel refuses the memory.
  static absl::StatusOr<SealedMemory> Create(const std::string& name, std::size_t bytes);

  SealedMemory(SealedMemory&& other) noexcept;
  SealedMemory& operator=(SealedMemory&& other) noexcept;
  ~SealedMemory();

  // True: nobody can free a page any more, map the memory writable or add a seal. Mappings that
  // exist stay writable. Source of the rule: fcntl(2), F_SEAL_FUTURE_WRITE (Linux 5.1).
  bool PagesAreSealed() const;
  // OK if a holder has populated every page and then sealed the pages. Then nobody can free a page,
  // and no process that maps the pages ever allocates one. FAILED_PRECONDITION otherwise. Takes no
  // lock that a holder can hold.
  absl::Status CheckPopulatedAndSealed() const;

  enum class Populate : unsigned char { kNo, kYes };
  // Maps all of it, readable and writable. The caller unmaps it. RESOURCE_EXHAUSTED MEMORY: the
  // process has too many mappings, or no address space left.
  absl::StatusOr<std::byte*> Map(Populate populate) const;

  int fd() const { return fd_; }
  std::size_t bytes() const { return bytes_; }

 private:
  SealedMemory(int fd, std::size_t bytes) : fd_(fd), bytes_(bytes) {}

  int fd_;  // -1 after a move
  std::size_t bytes_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_SEALED_MEMORY_H_
