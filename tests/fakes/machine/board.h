// A page that every process of the fake machine maps, for changes that must be visible at once. All
// members are atomics. Thread-safe and process-safe.

#ifndef TESTS_FAKES_MACHINE_BOARD_H_
#define TESTS_FAKES_MACHINE_BOARD_H_

#include <atomic>
#include <cstdint>

#include "tests/fakes/machine/machine_description.h"

namespace gradsync::fakes {

struct Board {
  // Counts changes of the fault rules; a futex on which hanging calls wait.
  std::atomic<std::uint32_t> fault_generation;
  // Counts lines of the journal; a futex on which tests wait.
  std::atomic<std::uint32_t> journal_lines;
  // Under MPS: the sticky error (a CUresult) of one client, which reaches all clients of the GPU.
  // It becomes 0 again when all those clients have ended.
  std::atomic<std::int32_t> mps_fault[kMaxGpus];
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Waits until `word` differs from `value`, for at most `timeout_ms` (-1: without limit). May return
// early.
void FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t value, int timeout_ms);
void FutexWakeAll(const std::atomic<std::uint32_t>& word);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_BOARD_H_
