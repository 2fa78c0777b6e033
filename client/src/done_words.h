// The done words of one layout: this rank's waits for them, and their poison.

#ifndef CLIENT_SRC_DONE_WORDS_H_
#define CLIENT_SRC_DONE_WORDS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/src/daemon_silence.h"
#include "client/src/done_wait.h"
#include "client/src/mapped_memory.h"
#include "client/src/poison_keeper.h"
#include "gradsync/shared_memory.h"

namespace gradsync::client {

// One word per bucket, in memory that the daemon created. The daemon or, on a GPU, a worker writes
// the words. This object writes poison when the session has ended, or when this rank has given up
// the layout.
//
// Thread-safe; only Poison and EndPoison take a lock. Owned by the StepClient. It shares the
// mapping with the StreamHandoff.
class DoneWords {
 public:
  // `semaphores` holds `count` buckets. `on_device`: a GPU writes the words.
  DoneWords(std::shared_ptr<MappedMemory> semaphores, std::size_t count, bool on_device);

  // Blocks until the bucket's word releases a wait for `step`, until `deadline`, or until the
  // daemon is silent.
  DoneWait Await(std::size_t bucket, std::uint64_t step, absl::Time deadline,
                 DaemonSilence* silence) const;
  // True if a wait for the bucket in `step` would return at once.
  bool Released(std::size_t bucket, std::uint64_t step) const;
  // The last void step; 0: none. The daemon stores it before that step's done words.
  std::uint64_t LastVoid() const;

  // Releases every wait. Call it only when the daemon writes nothing more, or when this rank no
  // longer cares what the daemon writes. Writes the words before it takes a lock. On a GPU, then
  // keeps them poisoned until EndPoison, even if the GPU still writes to them. `step`:
  // StepProgress::next_step().
  void Poison(std::uint64_t step) ABSL_LOCKS_EXCLUDED(mutex_);
  // Call it when no stream waits any more. From then on nothing is kept poisoned.
  void EndPoison() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void KeepPoisoned(std::uint64_t step) ABSL_LOCKS_EXCLUDED(mutex_);
  const SemaphorePageHeader& header() const {
    return *reinterpret_cast<const SemaphorePageHeader*>(semaphores_->data());
  }
  BucketSemaphore* semaphores() const {
    return reinterpret_cast<BucketSemaphore*>(semaphores_->data() + sizeof(SemaphorePageHeader));
  }

  // Constant after construction.
  const std::shared_ptr<MappedMemory> semaphores_;
  const std::size_t count_;
  const bool on_device_;

  mutable DoneSleepers sleepers_{0};  // in Await

  absl::Mutex mutex_;
  // On a GPU, from the first Poison until EndPoison; null otherwise.
  std::unique_ptr<PoisonKeeper> keeper_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // since EndPoison
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DONE_WORDS_H_
