// Waiting for a bucket's `done` word (proto/gradsync/shared_memory.h) by futex, and releasing it
// after the daemon's death.

#ifndef CLIENT_SRC_DONE_WAIT_H_
#define CLIENT_SRC_DONE_WAIT_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace gradsync::client {

enum class DoneWait { kReached, kPoisoned, kTimedOut };

// Blocks until `word` releases a wait for `step`, or for `timeout`. What released it was stored
// before the word (acquire). Being released says nothing about the step's verdict.
DoneWait WaitDone(const std::atomic<std::uint64_t>& word, std::uint64_t step,
                  absl::Duration timeout);

// Releases every wait on `word` as poisoned. For the survivor alone.
void PoisonDone(std::atomic<std::uint64_t>* word, std::uint64_t step);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DONE_WAIT_H_
