// The clocks of the bench, all in nanoseconds: one for time, three for CPU time.

#ifndef TOOLS_BENCH_CLOCKS_H_
#define TOOLS_BENCH_CLOCKS_H_

#include <sys/types.h>
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

// User and system time of another process, all its threads, to the nanosecond (/proc/PID/stat
// counts in ticks of 10 ms). 0 if it is gone.
inline std::int64_t ProcessCpuNs(pid_t pid) {
  clockid_t clock;
  return clock_getcpuclockid(pid, &clock) == 0 ? ClockNs(clock) : 0;
}

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CLOCKS_H_
