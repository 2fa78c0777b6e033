// The timeline semaphores of one session's layout (layout in proto/gradsync/shared_memory.h).

#ifndef DAEMON_ARENA_SEMAPHORE_PAGE_H_
#define DAEMON_ARENA_SEMAPHORE_PAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/arena/sealed_memory.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync {

// The daemon's side: it writes the done words and the void step, and decides nothing by a word that
// it reads back, because the trainer can write any of them. Order of a void step: DeclareVoid, then
// SignalDone of every bucket that still owes it.
//
// Thread-safe; each word has one writer at a time. Owns the memory's descriptor and the daemon's
// mapping, which belong to one incarnation of a session: never used again for another.
class SemaphorePage {
 public:
  // All words 0, mapped and present: a signal never faults. `buckets` may be 0. Statuses as
  // SealedMemory::Create, and those of mmap.
  static absl::StatusOr<std::shared_ptr<SemaphorePage>> Create(std::size_t buckets);
  ~SemaphorePage();
  SemaphorePage(const SemaphorePage&) = delete;
  SemaphorePage& operator=(const SemaphorePage&) = delete;

  // For passing on; stays the page's.
  int fd() const { return memory_.fd(); }
  // SemaphoreBytes(buckets()), rounded up to whole pages.
  std::size_t bytes() const { return memory_.bytes(); }
  std::size_t buckets() const { return buckets_; }

  // Says that `bucket`, which is below buckets(), is done with `step`: everything this thread wrote
  // before is visible to whoever sees it. Wakes every waiter of that bucket, in any process; 1
  // microsecond if there is none.
  void SignalDone(std::size_t bucket, std::uint64_t step);

  // Wakes every waiter of a bucket whose done word a GPU has written.
  void WakeDone(std::size_t bucket);

  // Says that `step` is void. Wakes nobody.
  void DeclareVoid(std::uint64_t step);

  // What the trainer's GPU has written: for messages to people alone.
  bool ReadyShown(std::size_t bucket, std::uint64_t step) const;

 private:
  SemaphorePage(SealedMemory memory, std::size_t buckets, void* address);

  BucketSemaphore* Bucket(std::size_t bucket) const;

  const SealedMemory memory_;
  const std::size_t buckets_;
  void* const address_;
};

}  // namespace gradsync

#endif  // DAEMON_ARENA_SEMAPHORE_PAGE_H_
