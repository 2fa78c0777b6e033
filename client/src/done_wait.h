// Waits by futex for a bucket's `done` word (proto/gradsync/shared_memory.h), and releases such
// waits when the daemon is lost.

#ifndef CLIENT_SRC_DONE_WAIT_H_
#define CLIENT_SRC_DONE_WAIT_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace gradsync::client {

// kSilent: the daemon is silent. WaitDone itself never returns it.
enum class DoneWait { kReached, kPoisoned, kTimedOut, kSilent };

// The threads that sleep in WaitDone on any word of one layout.
using DoneSleepers = std::atomic<std::uint32_t>;

// Blocks until `word` releases a wait for `step`, or until `timeout` expires. Loads the word with
// acquire, so everything stored before it is visible. The release says nothing about the verdict.
// The daemon wakes at most kDoneWakes waiters. If `sleepers` counts more, a released wait wakes
// others. Null: there are never more.
DoneWait WaitDone(const std::atomic<std::uint64_t>& word, std::uint64_t step,
                  absl::Duration timeout, DoneSleepers* sleepers = nullptr);

// Releases every wait on `word` with kPoisoned. Call it only when the daemon no longer writes the
// word.
void PoisonDone(std::atomic<std::uint64_t>* word, std::uint64_t step);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DONE_WAIT_H_
