// The timeline semaphores of one session's layout. proto/gradsync/shared_memory.h describes their
// memory.

#ifndef DAEMON_ARENA_SEMAPHORE_PAGE_H_
#define DAEMON_ARENA_SEMAPHORE_PAGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/arena/sealed_memory.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {

// The daemon's side of the semaphores. It writes the done words and the void step. It never bases a
// decision on a word that it reads back, because the trainer can write all words. For a void step,
// call DeclareVoid first, then SignalDone for every bucket that has not signalled the step yet.
//
// Thread-safe, except Accept(), which must return before other threads signal; each word has one
// writer at a time. Owns the memory's descriptor and the daemon's mapping. They belong to one
// incarnation of a session and are never reused for another. The memory itself lives until the
// trainer, too, has unmapped it.
class SemaphorePage {
 public:
  // Which process allocates the pages, and is charged for them as long as any process maps them.
  enum class Pages : std::uint8_t {
    kOfTrainer,  // as in a HostArena: the trainer populates and seals them before Accept()
    kOfDaemon,   // for a GPU: the driver needs them before the trainer has them
  };
  // All words are 0. `buckets` may be 0. With kOfTrainer touches no page. Errors are those of
  // SealedMemory::Create and of mmap.
  static absl::StatusOr<std::shared_ptr<SemaphorePage>> Create(std::size_t buckets,
                                                               Pages pages = Pages::kOfDaemon);
  ~SemaphorePage();
  SemaphorePage(const SemaphorePage&) = delete;
  SemaphorePage& operator=(const SemaphorePage&) = delete;

  // With kOfTrainer, called once, before the first signal: makes every page present, so that a
  // signal never faults. FAILED_PRECONDITION: the trainer has not populated and sealed the pages.
  // Otherwise an error of the kernel.
  absl::Status Accept();

  // For passing to the trainer. The page keeps ownership.
  int fd() const { return memory_.fd(); }
  // SemaphoreBytes(buckets()), rounded up as SealedMemory::Create says.
  std::size_t bytes() const { return memory_.bytes(); }
  std::size_t buckets() const { return buckets_; }

  // Signals that `bucket`, which is below buckets(), is done with `step`. A reader of the signal
  // sees everything that this thread wrote before. Wakes at most kDoneWakes waiters of that bucket,
  // in any process. Takes 1 microsecond if there is no waiter.
  void SignalDone(std::size_t bucket, std::uint64_t step);

  // The two parts of SignalDone. A GPU writes the done word itself.
  void SetDone(std::size_t bucket, std::uint64_t step);
  void WakeDone(std::size_t bucket);

  // Marks `step` as void. Wakes nobody.
  void DeclareVoid(std::uint64_t step);

  // Call it when the trainer's session is lost. Calls that begin after this write nothing. Reason:
  // a trainer that was only stopped may go on, and must not mistake a later result for its own.
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
