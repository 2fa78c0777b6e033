// How often to look at something that sends no notification.

#ifndef DAEMON_WORKER_POLL_PACE_H_
#define DAEMON_WORKER_POLL_PACE_H_

#include <algorithm>
#include <cstdint>

namespace gradsync::daemon {

// The pauses grow with the wait: an early event is noticed early, and a long wait costs little. An
// event that comes after a time T is noticed about T/16 later; this delay stays between kLeastNs
// and kMostNs.
//
// All times are nanoseconds of CLOCK_MONOTONIC. Not thread-safe.
class PollPace {
 public:
  // Long enough that the looks cost little, and shorter than the reduction of a bucket of 1 MiB.
  static constexpr std::uint64_t kLeastNs = 10'000;
  // The pause for most of a backward pass: about 10,000 looks a second.
  static constexpr std::uint64_t kMostNs = 100'000;

  // A wait begins: for the first thing, or for the next one.
  void Restart(std::uint64_t now_ns) { since_ns_ = now_ns; }
  // How long to sleep before the next look.
  std::uint64_t PauseNs(std::uint64_t now_ns) const {
    return std::clamp((now_ns - since_ns_) / 16, kLeastNs, kMostNs);
  }

 private:
  std::uint64_t since_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_POLL_PACE_H_
