#include "daemon/arena/semaphore_page.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cassert>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

// Not FUTEX_PRIVATE_FLAG: the waiters are in other processes.
void Wake(std::atomic<std::uint64_t>* word) {
  // The futex is the word's low 32 bits, which are its first four bytes (little-endian ABI).
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAKE, kDoneWakes, nullptr,
          nullptr, 0);
}

}  // namespace

absl::StatusOr<std::shared_ptr<SemaphorePage>> SemaphorePage::Create(std::size_t buckets,
                                                                     Pages pages) {
  if (buckets > (std::numeric_limits<std::size_t>::max() - sizeof(SemaphorePageHeader)) /
                    sizeof(BucketSemaphore)) {
    return absl::InvalidArgumentError(absl::StrCat(buckets, " buckets are too many"));
  }
  absl::StatusOr<SealedMemory> memory =
      SealedMemory::Create("gradsync-semaphores", SemaphoreBytes(buckets));
  if (!memory.ok()) return memory.status();
  // Maps them now, because nobody can map them writable once the trainer has sealed them.
  const absl::StatusOr<std::byte*> address = memory->Map(
      pages == Pages::kOfDaemon ? SealedMemory::Populate::kYes : SealedMemory::Populate::kNo);
  if (!address.ok()) return address.status();
  return std::shared_ptr<SemaphorePage>(new SemaphorePage(*std::move(memory), buckets, *address));
}

SemaphorePage::SemaphorePage(SealedMemory memory, std::size_t buckets, void* address)
    : memory_(std::move(memory)), buckets_(buckets), address_(address) {}

SemaphorePage::~SemaphorePage() { munmap(address_, bytes()); }

absl::Status SemaphorePage::Accept() {
  if (absl::Status checked = memory_.CheckPopulatedAndSealed(); !checked.ok()) return checked;
  // EINVAL means a kernel before 5.14: then the first signals fault.
  if (madvise(address_, bytes(), MADV_POPULATE_WRITE) == 0 || errno == EINVAL) {
    return absl::OkStatus();
  }
  return absl::ErrnoToStatus(
      errno, absl::StrCat("populating the mapping of ", bytes(), " bytes of semaphores"));
}

void SemaphorePage::SignalDone(std::size_t bucket, std::uint64_t step) {
  if (closed_.load(std::memory_order_relaxed)) return;
  SetDone(bucket, step);
  WakeDone(bucket);
}

void SemaphorePage::SetDone(std::size_t bucket, std::uint64_t step) {
  if (closed_.load(std::memory_order_relaxed)) return;
  Bucket(bucket)->done.store(step, std::memory_order_release);
}

void SemaphorePage::WakeDone(std::size_t bucket) { Wake(&Bucket(bucket)->done); }

void SemaphorePage::DeclareVoid(std::uint64_t step) {
  if (closed_.load(std::memory_order_relaxed)) return;
  static_cast<SemaphorePageHeader*>(address_)->void_step.store(step, std::memory_order_release);
}

bool SemaphorePage::ReadyShown(std::size_t bucket, std::uint64_t step) const {
  return SemaphoreReleased(Bucket(bucket)->ready.load(std::memory_order_acquire), step);
}

BucketSemaphore* SemaphorePage::Bucket(std::size_t bucket) const {
  assert(bucket < buckets_);
  std::byte* const first = static_cast<std::byte*>(address_) + sizeof(SemaphorePageHeader);
  return reinterpret_cast<BucketSemaphore*>(first) + bucket;
}

}  // namespace gradsync::daemon
