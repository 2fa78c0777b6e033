// How long tests wait, and how fast gradsync must be. wake_up_delay.h makes bounds fair on a busy
// machine.

#ifndef TESTS_KIT_DEADLINE_H_
#define TESTS_KIT_DEADLINE_H_

#include <time.h>

#include <cstdint>

namespace gradsync {

// The specified bounds hold for a release build. Sanitizers make both sides several times slower,
// so tests multiply the bounds by this.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kScale = 5;
#else
inline constexpr int kScale = 1;
#endif

// Every other rank learns of a lost rank or an abandoned step within this time.
inline constexpr std::uint64_t kLossBoundNs = 100'000'000ull * kScale;

// A test waits this long for anything, then fails.
inline constexpr int kPatienceMs = 40'000 * kScale;

// The time on the clock that every process of a test uses.
inline std::uint64_t NowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ull +
         static_cast<std::uint64_t>(now.tv_nsec);
}

// Milliseconds until a time on this clock, rounded up. 0: it has passed.
inline int MsUntil(std::uint64_t ns) {
  const std::uint64_t now_ns = NowNs();
  return now_ns >= ns ? 0 : static_cast<int>((ns - now_ns) / 1'000'000) + 1;
}

}  // namespace gradsync

#endif  // TESTS_KIT_DEADLINE_H_
