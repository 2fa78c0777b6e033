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

namespace gradsync {

// A sealed memfd and the daemon's mapping of it. Call order: Create (CheckPopulated | fd)* Map?
// (CheckPopulated | data)*. Map() is not thread-safe and happens before data() is used elsewhere;
// the rest is thread-safe.
//
// Owns descriptor and mapping. Shared, because what reduces a bucket keeps its arena mapped until
// it is done with it; the memory itself lives until the trainer has unmapped it too.
class HostArena {
 public:
  // See SealedMemory::Create. Neither maps nor touches a page: a page is charged to the cgroup, and
  // placed on the NUMA node, of whoever touches it first, and that is to be the trainer.
  static absl::StatusOr<std::shared_ptr<HostArena>> Create(const std::string& name,
                                                           std::size_t bytes);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // For passing on; stays the arena's.
  int fd() const { return memory_.fd(); }
  // As asked for, rounded up to whole pages, one at least.
  std::size_t bytes() const { return memory_.bytes(); }

  // OK if as many bytes as `expected` (rounded up to pages) are allocated: with bytes(), all of
  // them. FAILED_PRECONDITION with both figures if not: the trainer has not populated the arena
  // yet, or has punched a hole into it. One system call, about a microsecond.
  absl::Status CheckPopulated(std::size_t expected) const;
  absl::Status CheckPopulated() const { return CheckPopulated(bytes()); }

  // Maps the arena and fills this process's page tables for its first `populate` bytes, so that no
  // step pays for faults (100 MiB: 7 to 24 ms). Only after CheckPopulated(populate) said OK: it
  // allocates what is missing, at the daemon's expense. FAILED_PRECONDITION if mapped already,
  // RESOURCE_EXHAUSTED or another of the kernel's errors if there is no memory, and then the arena
  // is not mapped.
  absl::Status Map(std::size_t populate);
  absl::Status Map() { return Map(bytes()); }

  // Null until Map() has succeeded. Page-aligned.
  std::byte* data() const { return data_; }

 private:
  explicit HostArena(SealedMemory memory);

  const SealedMemory memory_;
  std::byte* data_ = nullptr;  // set once, by Map()
};

}  // namespace gradsync

#endif  // DAEMON_ARENA_HOST_ARENA_H_
