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

// Poison releases every stream that waits. But a GPU may have a step's number on its way into a
// word when the daemon dies, which takes the poison away; a stream that comes to its wait for the
// step after that would park, and there is nobody left to release it.
//
// Has a thread of its own, in the place of the session's, which has ended or is about to: it looks
// at the words after a millisecond, and less and less often, up to its destruction. Without a
// thread the words are poisoned once.
class PoisonKeeper {
 public:
  // The words outlive this.
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
  bool over_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: starts when the rest stands
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_POISON_KEEPER_H_
