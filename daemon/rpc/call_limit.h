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

// The server's own count is cheap, but can be too high or too low. Some calls never end in it.
// Others have ended in it although a connection that is busy with reading still holds them. The
// connections' counts are right but costly. So they are asked for when the server's count of open
// calls rises beyond the limit, and after every `most` calls. Not thread-safe.
class CallLimit {
 public:
  // `most`: how many calls all connections together may have open. If there are more, connections
  // are ended until at most `enough` calls are left, and no connection has more than `most_of_one`.
  CallLimit(std::uint64_t most, std::uint64_t enough, std::uint64_t most_of_one)
      : most_(most), enough_(enough), most_of_one_(most_of_one) {}

  // `counted`: the server's count. True: ask for the connections' counts, too, and call ToEnd().
  bool NeedsConnections(const CallCounts& counted) {
    // Calls that seemed never to end may have ended by now, such as those of a connection that was
    // closed meanwhile.
    never_end_ = std::min(never_end_, counted.open());
    return counted.open() > never_end_ + most_ || counted.started > looked_at_started_ + most_;
  }

  // The places in `open` of the connections to end, those with the most open calls first.
  // `counted`: the server's count, taken before the connections'. `open`: the open calls of each
  // connection.
  std::vector<std::size_t> ToEnd(const CallCounts& counted,
                                 const std::vector<std::uint64_t>& open) {
    std::uint64_t left = std::accumulate(open.begin(), open.end(), std::uint64_t{0});
    never_end_ = counted.open() > left ? counted.open() - left : 0;
    looked_at_started_ = counted.started;
    if (left <= most_) return {};
    std::vector<std::size_t> places(open.size());
    std::iota(places.begin(), places.end(), 0);
    std::sort(places.begin(), places.end(), [&](auto a, auto b) { return open[a] > open[b]; });
    std::size_t chosen = 0;
    for (; chosen < places.size(); ++chosen) {
      const std::uint64_t calls = open[places[chosen]];
      if (left <= enough_ && calls <= most_of_one_) break;
      left -= calls;
    }
    places.resize(chosen);
    return places;
  }

 private:
  const std::uint64_t most_;
  const std::uint64_t enough_;
  const std::uint64_t most_of_one_;
  std::uint64_t never_end_ = 0;          // open in the server's count, but in no connection's
  std::uint64_t looked_at_started_ = 0;  // calls that had begun at the last ToEnd()
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_CALL_LIMIT_H_
