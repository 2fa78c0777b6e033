// The page that every process of the fake machine maps: what changes and must be seen at once.
// Thread-safe and process-safe: atomics only.

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
  // MPS is shared fate: the sticky error (a CUresult) of one client, which every client of the GPU
  // then has. 0 again when all of them are gone.
  std::atomic<std::int32_t> mps_fault[kMaxGpus];
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Waits until `word` is not `value` any more, or for `timeout_ms` (-1: for ever). May return
// early.
void FutexWait(const std::atomic<std::uint32_t>& word, std::uint32_t value, int timeout_ms);
void FutexWakeAll(const std::atomic<std::uint32_t>& word);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_MACHINE_BOARD_H_
