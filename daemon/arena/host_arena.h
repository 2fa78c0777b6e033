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

// A sealed memfd and the daemon's mapping of it. Call order: Create fd* Accept? (fd | data)*.
// Accept() is not thread-safe and must return before other threads use data(). The other methods
// are thread-safe.
//
// Owns the descriptor and the mapping. Shared, because a reduction keeps the arena of its bucket
// mapped until it is done. The memory itself lives until the trainer, too, has unmapped it.
class HostArena {
 public:
  // See SealedMemory::Create. Maps the memory and touches no page. The trainer must be the first to
  // touch each page, because a page is charged to the cgroup and placed on the NUMA node of the
  // process that touches it first. Then it must seal the pages.
  static absl::StatusOr<std::shared_ptr<HostArena>> Create(const std::string& name,
                                                           std::size_t bytes);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // For passing to the trainer. The arena keeps ownership.
  int fd() const { return memory_.fd(); }
  // The requested size, rounded up as SealedMemory::Create says.
  std::size_t bytes() const { return memory_.bytes(); }

  // When to fill this process's page tables.
  enum class Faults {
    kNow,    // so that no step pays for the faults (100 MiB: 7 to 24 ms)
    kLater,  // at the first use of each page
  };
  // Checks that the trainer has populated and sealed the arena. Then nobody can free a page of it
  // any more, and the daemon never allocates one. Takes no lock that the trainer can hold.
  // FAILED_PRECONDITION if it is not sealed, a page is missing, or the arena was accepted before.
  // Otherwise an error of the kernel. An error does not change data().
  absl::Status Accept(Faults faults = Faults::kNow);

  // Null until Accept() has succeeded. Page-aligned.
  std::byte* data() const { return data_; }

 private:
  HostArena(SealedMemory memory, std::byte* address);

  const SealedMemory memory_;
  std::byte* const address_;
  std::byte* data_ = nullptr;  // address_, once it is accepted
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_HOST_ARENA_H_
