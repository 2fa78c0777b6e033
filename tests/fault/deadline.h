// How long tests wait, and how fast gradsync must be.

#ifndef TESTS_FAULT_DEADLINE_H_
#define TESTS_FAULT_DEADLINE_H_

#include <time.h>

#include <cstdint>

namespace gradsync::fault {

// Sanitizers make both sides several times slower; the bounds of the specification are those of a
// release build and scaled by this there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kScale = 5;
#else
inline constexpr int kScale = 1;
#endif

// A death or an abandoned step is known to every other rank within this.
inline constexpr std::uint64_t kLossBoundNs = 100'000'000ull * kScale;

// Anything that has not come after this will not come; the test fails.
inline constexpr int kPatienceMs = 40'000;

// The clock of timestamps in every process of a test.
inline std::uint64_t NowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ull +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace gradsync::fault

#endif  // TESTS_FAULT_DEADLINE_H_
