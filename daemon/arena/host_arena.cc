#include "daemon/arena/host_arena.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

// The kernel holds the lock of the process's mappings for as long as a call lasts. Other threads
// then wait as soon as the allocator asks the kernel for memory. A piece takes less than 1 ms.
constexpr std::size_t kPieceBytes = std::size_t{4} << 20;

// Calls call(begin, bytes) for one piece after the other, until it returns false.
template <class Call>
bool InPieces(std::byte* begin, std::size_t bytes, const Call& call) {
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    if (!call(begin + at, std::min(kPieceBytes, bytes - at))) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::shared_ptr<HostArena>> HostArena::Create(const std::string& name,
                                                             std::size_t bytes) {
  absl::StatusOr<SealedMemory> memory = SealedMemory::Create(name, bytes);
  if (!memory.ok()) return memory.status();
  // Now, because nobody can map it writable once the trainer has sealed it.
  const absl::StatusOr<std::byte*> address = memory->Map(SealedMemory::Populate::kNo);
  if (!address.ok()) return address.status();
  return std::shared_ptr<HostArena>(new HostArena(*std::move(memory), *address));
}

HostArena::HostArena(SealedMemory memory, std::byte* address)
    : memory_(std::move(memory)), address_(address) {}

HostArena::~HostArena() { UnmapNext(bytes()); }

void HostArena::UnmapNext(std::size_t bytes) {
  const std::size_t next = std::min(bytes, memory_.bytes() - unmapped_);
  InPieces(address_ + unmapped_, next,
           [](std::byte* piece, std::size_t size) { return munmap(piece, size) == 0; });
  unmapped_ += next;
}

std::shared_ptr<HostArena> HostArena::UnmapInTurns(std::shared_ptr<HostArena> arena,
                                                   const UserQueue& turns, std::size_t bytes,
                                                   std::shared_ptr<void> charge) {
  HostArena* const address = arena.get();
  return std::shared_ptr<HostArena>(
      address, [held = std::move(arena), turns, bytes,
                charge = std::move(charge)](HostArena* /*held*/) mutable {
        // All turns are queued now, so that work that is queued later finds the memory unmapped.
        for (std::size_t left = held->bytes(); left > bytes; left -= bytes) {
          turns.Run([held, bytes] { held->UnmapNext(bytes); });
        }
        // Weak references keep this function, so it gives up what it holds. The last turn unmaps
        // the rest.
        turns.Run([held = std::move(held), charge = std::move(charge)]() mutable {
          held.reset();
          charge.reset();
        });
      });
}

absl::Status HostArena::CheckAcceptable() const {
  if (data_ != nullptr) return absl::FailedPreconditionError("the arena is in use already");
  return memory_.CheckPopulatedAndSealed();
}

absl::Status HostArena::Accept(Faults faults) {
  if (faults == Faults::kNow) return AcceptNext(bytes()).status();
  absl::Status checked = CheckAcceptable();
  if (checked.ok()) data_ = address_;
  return checked;
}

absl::StatusOr<bool> HostArena::AcceptNext(std::size_t bytes) {
  if (absl::Status checked = CheckAcceptable(); !checked.ok()) return checked;
  // EINVAL means a kernel before 5.14. The arena works without this call, but the first step is
  // slower.
  const auto populate = [](std::byte* piece, std::size_t size) {
    return madvise(piece, size, MADV_POPULATE_WRITE) == 0;
  };
  const std::size_t next = std::min(bytes, memory_.bytes() - populated_);
  if (!InPieces(address_ + populated_, next, populate) && errno != EINVAL) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat("populating the mapping of an arena of ", memory_.bytes(), " bytes"));
  }
  populated_ += next;
  if (populated_ < memory_.bytes()) return false;
  data_ = address_;
  return true;
}

}  // namespace gradsync::daemon
