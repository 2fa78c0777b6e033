// Limits how often something may happen.

#ifndef DAEMON_BASE_RATE_LIMIT_H_
#define DAEMON_BASE_RATE_LIMIT_H_

#include <algorithm>
#include <cstdint>

namespace gradsync::daemon {

// `most` times in a row; each time is regained after `each_ns`. A token bucket, kept as one number:
// when all times will have been regained. A value.
class RateLimit {
 public:
  struct Rate {
    std::uint64_t most;
    std::uint64_t each_ns;
  };

  // Counts one more at `now_ns`. False: it is one too many, and does not count.
  bool Take(const Rate& rate, std::uint64_t now_ns) {
    if (!Has(rate, now_ns)) return false;
    all_at_ns_ = std::max(all_at_ns_, now_ns) + rate.each_ns;
    return true;
  }
  // Whether Take() would count one.
  bool Has(const Rate& rate, std::uint64_t now_ns) const {
    return std::max(all_at_ns_, now_ns) + rate.each_ns <= now_ns + rate.most * rate.each_ns;
  }
  bool HasAll(std::uint64_t now_ns) const { return all_at_ns_ <= now_ns; }

 private:
  std::uint64_t all_at_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_RATE_LIMIT_H_
