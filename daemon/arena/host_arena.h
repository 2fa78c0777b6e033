// Host memory that a trainer and the daemon share: the buckets of a layout, or a session's staging
// area.

#ifndef DAEMON_ARENA_HOST_ARENA_H_
#define DAEMON_ARENA_HOST_ARENA_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/sealed_memory.h"

namespace gradsync::daemon {

// A sealed memfd and the daemon's mapping of it. Call order: Create (CheckPopulated | fd)* Map?
// (CheckPopulated | data)*. Map() is not thread-safe and must return before other threads use
// data(). The other methods are thread-safe.
//
// Owns the descriptor and the mapping. Shared, because a reduction keeps the arena of its bucket
// mapped until it is done. The memory itself lives until the trainer has unmapped it, too.
class HostArena {
 public:
  // See SealedMemory::Create. Neither maps nor touches a page. The trainer must touch each page
  // first, because a page is charged to the cgroup and placed on the NUMA node of the process that
  // touches it first.
  static absl::StatusOr<std::shared_ptr<HostArena>> Create(const std::string& name,
                                                           std::size_t bytes);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // For passing to the trainer. The arena keeps ownership.
  int fd() const { return memory_.fd(); }
  // The requested size, rounded up to whole pages; at least one page.
  std::size_t bytes() const { return memory_.bytes(); }

  // OK if at least `expected` bytes (rounded up to pages) are allocated; with bytes(), the whole
  // arena. Otherwise FAILED_PRECONDITION with both sizes: the trainer has not populated the arena
  // yet, or has punched a hole into it. One system call, about a microsecond.
  absl::Status CheckPopulated(std::size_t expected) const;
  absl::Status CheckPopulated() const { return CheckPopulated(bytes()); }

  // Maps the arena and fills this process's page tables for its first `populate` bytes, so that no
  // step pays for faults (100 MiB: 7 to 24 ms). Call it only after CheckPopulated(populate)
  // returned OK: it allocates missing pages and charges them to the daemon. FAILED_PRECONDITION if
  // the arena is already mapped. RESOURCE_EXHAUSTED or another error of the kernel if there is no
  // memory; the arena is then not mapped.
  absl::Status Map(std::size_t populate);
  absl::Status Map() { return Map(bytes()); }

  // Null until Map() has succeeded. Page-aligned.
  std::byte* data() const { return data_; }

 private:
  explicit HostArena(SealedMemory memory);

  const SealedMemory memory_;
  std::byte* data_ = nullptr;  // set once, by Map()
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_HOST_ARENA_H_
