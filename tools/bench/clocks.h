// The clocks of the bench, all in nanoseconds: one for time, two for CPU time.

#ifndef TOOLS_BENCH_CLOCKS_H_
#define TOOLS_BENCH_CLOCKS_H_

#include <time.h>

#include <cstdint>

namespace gradsync::bench {

inline std::int64_t ClockNs(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline std::int64_t MonotonicNs() { return ClockNs(CLOCK_MONOTONIC); }
inline std::int64_t ThreadCpuNs() { return ClockNs(CLOCK_THREAD_CPUTIME_ID); }
inline std::int64_t ProcessCpuNs() { return ClockNs(CLOCK_PROCESS_CPUTIME_ID); }

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CLOCKS_H_
