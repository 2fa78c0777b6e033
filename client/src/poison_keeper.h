// Keeps the done words of a layout on a GPU poisoned.

#ifndef CLIENT_SRC_POISON_KEEPER_H_
#define CLIENT_SRC_POISON_KEEPER_H_

#include <cstddef>
#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gradsync/shared_memory.h"

namespace gradsync::client {

// Poison releases every stream that waits. But when the daemon is lost, a GPU may still write a
// step's number to a word, over the poison. A stream that then waits for the next step would wait
// forever.
//
// So a thread looks at the words after a millisecond, and then less and less often, until the
// destructor. It needs a thread of its own, because the session's thread has ended or is about to
// end. If no thread can be started, the words are poisoned only once.
//
// Thread-compatible. Owned by its DoneWords.
class PoisonKeeper {
 public:
  // The words outlive this object.
  PoisonKeeper(BucketSemaphore* words, std::size_t count, std::uint64_t step);
  ~PoisonKeeper();
  PoisonKeeper(const PoisonKeeper&) = delete;
  PoisonKeeper& operator=(const PoisonKeeper&) = delete;

 private:
  void Keep() ABSL_LOCKS_EXCLUDED(mutex_);
  void Poison() const;

  BucketSemaphore* const words_;
  const std::size_t count_;
  const std::uint64_t step_;

  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: starts when the other members are constructed
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_POISON_KEEPER_H_
