// Chooses the connections of a server that have too many open calls, from gRPC's counts.

#ifndef DAEMON_RPC_CALL_LIMIT_H_
#define DAEMON_RPC_CALL_LIMIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "daemon/rpc/call_counts.h"

namespace gradsync::daemon {

// The server's own count costs little, and can be wrong both ways: some calls never end in it, and
// some end in it while a thread that reads their connection still holds them. The connections'
// counts are right but costly. So they are asked for only if busy connections may have more than
// `most` open calls, or if more than `most` calls have begun since the last time. Not thread-safe.
class CallLimit {
 public:
  // A connection is busy if it has more than `few` open calls.
  struct Bounds {
    // How many calls the busy connections together may have open. If there are more, busy
    // connections are ended until at most `enough` calls are left, and none has more than
    // `most_of_one`.
    std::uint64_t most = 0;
    std::uint64_t enough = 0;
    std::uint64_t most_of_one = 0;
    std::uint64_t few = 0;
    // How many calls the other connections together may have open.
    std::uint64_t most_of_others = 0;
  };

  explicit CallLimit(const Bounds& bounds) : bounds_(bounds) {}

  // `counted`: the server's count. True: ask for the connections' counts, too, and call ToEnd().
  bool NeedsConnections(const CallCounts& counted) {
    // Some of the calls in quiet_ may have ended by now, such as those of a connection that was
    // closed meanwhile.
    quiet_ = std::min(quiet_, counted.open());
    return counted.open() > quiet_ + bounds_.most ||
           counted.started > looked_at_started_ + bounds_.most;
  }

  // The places in `open` of the connections to end, those with the most open calls first.
  // `counted`: the server's count, taken before the connections'. `open`: the open calls of each
  // connection.
  std::vector<std::size_t> ToEnd(const CallCounts& counted,
                                 const std::vector<std::uint64_t>& open) {
    std::uint64_t busy = 0, others = 0;
    for (const std::uint64_t calls : open) (IsBusy(calls) ? busy : others) += calls;
    quiet_ = counted.open() > busy ? counted.open() - busy : 0;
    looked_at_started_ = counted.started;
    const bool too_busy = busy > bounds_.most;
    std::vector<std::size_t> places(open.size());
    std::iota(places.begin(), places.end(), 0);
    std::sort(places.begin(), places.end(), [&](auto a, auto b) { return open[a] > open[b]; });
    std::vector<std::size_t> chosen;
    for (const std::size_t place : places) {
      const std::uint64_t calls = open[place];
      if (IsBusy(calls)) {
        if (!too_busy || (busy <= bounds_.enough && calls <= bounds_.most_of_one)) continue;
        busy -= calls;
      } else {
        if (others <= bounds_.most_of_others) break;
        others -= calls;
      }
      chosen.push_back(place);
    }
    return chosen;
  }

 private:
  bool IsBusy(std::uint64_t calls) const { return calls > bounds_.few; }

  const Bounds bounds_;
  // Open in the server's count, but in no busy connection's.
  std::uint64_t quiet_ = 0;
  std::uint64_t looked_at_started_ = 0;  // calls that had begun at the last ToEnd()
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CALL_LIMIT_H_
