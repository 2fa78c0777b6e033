// How long a caller that does harm must wait.

#ifndef DAEMON_BASE_GROWING_PAUSE_H_
#define DAEMON_BASE_GROWING_PAUSE_H_

#include <algorithm>
#include <cstdint>

namespace gradsync::daemon {

// The first pause lasts for kFirstNs. Each further pause is twice as long as the one before, up to
// kMostNs. After kForgivenNs without harm, pauses begin with kFirstNs again. So a caller that does
// harm again and again takes little of the daemon's time. A value.
class GrowingPause {
 public:
  static constexpr std::uint64_t kFirstNs = 1'000'000'000;
  static constexpr std::uint64_t kMostNs = 32'000'000'000;
  static constexpr std::uint64_t kForgivenNs = 60'000'000'000;

  // Call it when the caller does harm. Harm during a pause is an effect of what the caller did
  // before: no new pause begins, but this one lasts for at least kFirstNs from now on.
  void Extend(std::uint64_t now_ns) {
    if (Lasts(now_ns)) {
      until_ns_ = std::max(until_ns_, now_ns + kFirstNs);
      return;
    }
    length_ns_ = IsForgiven(now_ns) ? kFirstNs : std::min(2 * length_ns_, kMostNs);
    until_ns_ = now_ns + length_ns_;
  }
  bool Lasts(std::uint64_t now_ns) const { return now_ns < until_ns_; }
  // How long the pause still lasts; 0: there is none.
  std::uint64_t LeftNs(std::uint64_t now_ns) const {
    return Lasts(now_ns) ? until_ns_ - now_ns : 0;
  }
  // True if the next pause begins with kFirstNs.
  bool IsForgiven(std::uint64_t now_ns) const {
    return length_ns_ == 0 || now_ns >= until_ns_ + kForgivenNs;
  }

 private:
  std::uint64_t length_ns_ = 0;  // of the last one; 0: there was none
  std::uint64_t until_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_GROWING_PAUSE_H_
