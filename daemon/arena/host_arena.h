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
#include "daemon/base/user_executor.h"

namespace gradsync::daemon {

// A sealed memfd and the daemon's mapping of it. Call order: Create UnmapInTurns? fd* (Accept? |
// AcceptNext*) (fd | data)*. Accept() and AcceptNext() are not thread-safe, and must return before
// other threads use data(). The other methods are thread-safe.
//
// Owns the descriptor and the mapping. Shared, because a reduction keeps the arena of its bucket
// mapped until it is done. The memory itself lives until the trainer, too, has unmapped it.
class HostArena {
 public:
  // One turn on a thread that users share maps or unmaps at most this much: 20 to 80 ms. The last
  // turn may take longer: if the trainer has exited, it frees the memory (docs/bounds.md).
  static constexpr std::size_t kTurnBytes = std::size_t{256} << 20;

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
  // Accept() in pieces: fills the page tables of the next `bytes`, a multiple of the page size.
  // False: there is more to do, so call it again. Until it has returned true, data() is null.
  absl::StatusOr<bool> AcceptNext(std::size_t bytes);

  // Takes the only reference to `arena`, and returns another one. When the last copy of that one is
  // dropped, the arena is unmapped later, at most `bytes`, whole pages, in each turn. Then `charge`
  // is dropped. The executor outlives the copies.
  static std::shared_ptr<HostArena> UnmapInTurns(std::shared_ptr<HostArena> arena,
                                                 const UserQueue& turns, std::size_t bytes,
                                                 std::shared_ptr<void> charge);

  // Null until Accept() has succeeded. Page-aligned.
  std::byte* data() const { return data_; }

 private:
  HostArena(SealedMemory memory, std::byte* address);

  // OK if Accept() may begin or go on.
  absl::Status CheckAcceptable() const;
  // Unmaps the next `bytes`, or what is left. Nobody uses data() any more.
  void UnmapNext(std::size_t bytes);

  const SealedMemory memory_;
  std::byte* const address_;
  std::byte* data_ = nullptr;  // address_, once it is accepted
  std::size_t populated_ = 0;  // bytes from address_ on whose page tables are filled
  std::size_t unmapped_ = 0;   // bytes from address_ on
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_HOST_ARENA_H_
