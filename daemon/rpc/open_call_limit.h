// Decides when a user has too many open calls, from gRPC's counts.

#ifndef DAEMON_RPC_OPEN_CALL_LIMIT_H_
#define DAEMON_RPC_OPEN_CALL_LIMIT_H_

#include <algorithm>
#include <cstdint>

#include "daemon/rpc/call_counts.h"

namespace gradsync::daemon {

// Looks at the counts again and again. Too many calls end all connections of the user, who gets no
// new one until the calls have ended. Not thread-safe.
class OpenCallLimit {
 public:
  // Without a change of the counts for so long, the calls that can end have ended.
  static constexpr std::uint64_t kQuietNs = 1'000'000'000;
  // gRPC does not count the end of some calls that it refuses. Those of a client that makes a
  // mistake now and then must not add up: so many each second are taken for such calls.
  static constexpr std::uint64_t kForgivenEachSecond = 1;
  // The most that the time without a look forgives: nobody was connected then.
  static constexpr std::uint64_t kForgivenAtOnce = 60;

  explicit OpenCallLimit(std::uint64_t most) : most_(most) {}

  // True: end all connections. Called again within a second, while somebody is connected.
  bool Exceeded(const CallCounts& now, std::uint64_t now_ns) {
    if (last_forgiven_ns_ == 0) last_forgiven_ns_ = now_ns;
    const std::uint64_t seconds = (now_ns - last_forgiven_ns_) / 1'000'000'000;
    last_forgiven_ns_ += seconds * 1'000'000'000;
    const std::uint64_t forgiven = std::min(seconds * kForgivenEachSecond, kForgivenAtOnce);
    never_end_ = std::min(never_end_ + forgiven, now.open());
    const bool more = now.started > last_.started;
    if (more || now.ended != last_.ended) changed_ns_ = now_ns;
    last_ = now;
    if (refuses_) {
      if (more) return true;  // on a connection that has slipped through
      if (now_ns - changed_ns_ < kQuietNs) return false;
      refuses_ = false;
      never_end_ = now.open();
    }
    refuses_ = now.open() - never_end_ > most_;
    return refuses_;
  }
  // The user gets no new connection.
  bool refuses() const { return refuses_; }

 private:
  const std::uint64_t most_;
  CallCounts last_;
  std::uint64_t changed_ns_ = 0;
  std::uint64_t never_end_ = 0;  // of the open calls
  std::uint64_t last_forgiven_ns_ = 0;
  bool refuses_ = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_OPEN_CALL_LIMIT_H_
