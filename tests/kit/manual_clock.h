// A clock that stands still until a test moves it.

#ifndef TESTS_KIT_MANUAL_CLOCK_H_
#define TESTS_KIT_MANUAL_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "daemon/base/clock.h"

namespace gradsync::daemon {

// Thread-safe.
class ManualClock final : public Clock {
 public:
  // Not 0: a timestamp of 0 means "did not happen".
  static constexpr std::uint64_t kStartNs = 1'000'000'000;

  std::uint64_t NowNs() const override { return now_ns_.load(std::memory_order_relaxed); }
  void Advance(std::uint64_t ns) { now_ns_.fetch_add(ns, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> now_ns_{kStartNs};
};

}  // namespace gradsync::daemon

#endif  // TESTS_KIT_MANUAL_CLOCK_H_
