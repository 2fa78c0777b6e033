// Limits how often something may happen, for each of many.

#ifndef DAEMON_BASE_KEYED_RATE_H_
#define DAEMON_BASE_KEYED_RATE_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "daemon/base/rate_limit.h"

namespace gradsync::daemon {

// For each key: `burst` times in a row, all of which are regained within kRegainNs. Forgets the
// keys that have regained all. Not thread-safe.
template <typename Key>
class KeyedRate {
 public:
  static constexpr std::uint64_t kRegainNs = 16'000'000'000;

  explicit KeyedRate(std::size_t burst) : rate_{burst, kRegainNs / burst} {}

  // Counts one at `now_ns`. False: it is one too many, and does not count.
  bool Take(const Key& key, std::uint64_t now_ns) {
    if (limits_.size() >= kPruneAt) Prune(now_ns);
    return limits_[key].Take(rate_, now_ns);
  }
  // Whether Take() would count one.
  bool Has(const Key& key, std::uint64_t now_ns) const {
    const auto found = limits_.find(key);
    return found == limits_.end() || found->second.Has(rate_, now_ns);
  }

 private:
  static constexpr std::size_t kPruneAt = 1024;

  void Prune(std::uint64_t now_ns) {
    for (auto it = limits_.begin(); it != limits_.end();) {
      it = it->second.HasAll(now_ns) ? limits_.erase(it) : std::next(it);
    }
  }

  const RateLimit::Rate rate_;
  std::map<Key, RateLimit> limits_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_KEYED_RATE_H_
