// A clock that is passed as an argument. The job room reads the time only through a Clock, so its
// tests can choose the time.

#ifndef DAEMON_BASE_CLOCK_H_
#define DAEMON_BASE_CLOCK_H_

#include <time.h>

#include <cstdint>

namespace gradsync::daemon {

// Nanoseconds of CLOCK_MONOTONIC. All timestamps in messages, timelines and deadlines are of this
// clock. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::uint64_t NowNs() const = 0;
};

// Thread-safe. A call takes 20 ns (vDSO).
inline std::uint64_t MonotonicNowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

class MonotonicClock final : public Clock {
 public:
  std::uint64_t NowNs() const override { return MonotonicNowNs(); }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_CLOCK_H_
