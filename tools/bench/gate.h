// How the bench's processes wait for each other: futexes in shared memory. Nobody spins, for a
// spinning rank would take the core from the implementation whose turn it is.
//
// All of these live in zeroed shared memory, may be used by any thread of any process that maps it,
// and order memory: what one side wrote before is visible to the other side after.

#ifndef TOOLS_BENCH_GATE_H_
#define TOOLS_BENCH_GATE_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace gradsync::bench {

// One side posts, the others wait for a post later than the last one they have seen.
class Signal {
 public:
  std::uint32_t posted() const { return posted_.load(std::memory_order_acquire); }
  void Post();
  // Returns the number of posts once it differs from `seen`.
  std::uint32_t WaitPast(std::uint32_t seen);

 private:
  std::atomic<std::uint32_t> posted_{0};
};

// Many arrive, one waits for all of them: (Reset Arrive{parties} Wait)*.
class Arrivals {
 public:
  void Reset() { arrived_.store(0, std::memory_order_relaxed); }
  // Wakes the waiter if this is the last of `parties`.
  void Arrive(std::uint32_t parties);
  // True once `parties` have arrived; false after `timeout` or when a signal handler has run.
  bool Wait(std::uint32_t parties, absl::Duration timeout);

 private:
  std::atomic<std::uint32_t> arrived_{0};
};

// Releases its parties together. The last one to arrive goes on without sleeping.
class Barrier {
 public:
  void Wait(std::uint32_t parties);

 private:
  std::atomic<std::uint32_t> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_GATE_H_
