// The timeline semaphores of one session's layout. proto/gradsync/shared_memory.h describes their
// memory.

#ifndef DAEMON_ARENA_SEMAPHORE_PAGE_H_
#define DAEMON_ARENA_SEMAPHORE_PAGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/arena/sealed_memory.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {

// The daemon's side. It writes the done words and the void step. It never bases a decision on a
// word that it reads back, because the trainer can write all of them. For a void step, call
// DeclareVoid first, then SignalDone for every bucket that has not signalled the step yet.
//
// Thread-safe; each word has one writer at a time. Owns the memory's descriptor and the daemon's
// mapping. They belong to one incarnation of a session and are never reused for another.
class SemaphorePage {
 public:
  // All words are 0, mapped and present, so a signal never faults. `buckets` may be 0. Errors are
  // those of SealedMemory::Create and of mmap.
  static absl::StatusOr<std::shared_ptr<SemaphorePage>> Create(std::size_t buckets);
  ~SemaphorePage();
  SemaphorePage(const SemaphorePage&) = delete;
  SemaphorePage& operator=(const SemaphorePage&) = delete;

  // For passing to the trainer. The page keeps ownership.
  int fd() const { return memory_.fd(); }
  // SemaphoreBytes(buckets()), rounded up to whole pages.
  std::size_t bytes() const { return memory_.bytes(); }
  std::size_t buckets() const { return buckets_; }

  // Signals that `bucket`, which is below buckets(), is done with `step`. A reader of the signal
  // sees everything that this thread wrote before. Wakes every waiter of that bucket, in any
  // process. Takes 1 microsecond if there is none.
  void SignalDone(std::size_t bucket, std::uint64_t step);

  // Wakes every waiter of a bucket whose done word a GPU has written.
  void WakeDone(std::size_t bucket);

  // Marks `step` as void. Wakes nobody.
  void DeclareVoid(std::uint64_t step);

  // The trainer's session is lost. Calls of SignalDone and DeclareVoid that begin after this write
  // nothing. A trainer that was only stopped may go on, and must not mistake a later result for its
  // own.
  void Close() { closed_.store(true, std::memory_order_relaxed); }

  // True if the trainer's GPU has marked `bucket` ready for `step`. The trainer can forge this: use
  // it only in messages for people.
  bool ReadyShown(std::size_t bucket, std::uint64_t step) const;

 private:
  SemaphorePage(SealedMemory memory, std::size_t buckets, void* address);

  BucketSemaphore* Bucket(std::size_t bucket) const;

  const SealedMemory memory_;
  const std::size_t buckets_;
  void* const address_;
  std::atomic<bool> closed_{false};
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ARENA_SEMAPHORE_PAGE_H_
