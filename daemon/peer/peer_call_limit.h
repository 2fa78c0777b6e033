// Chooses the connections of the peer port that have too many open calls, from gRPC's counts.

#ifndef DAEMON_PEER_PEER_CALL_LIMIT_H_
#define DAEMON_PEER_PEER_CALL_LIMIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/rpc/call_counts.h"

namespace gradsync::daemon {

// The server's own count is cheap to ask for, but wrong both ways: some calls never end in it, and
// some have ended there while the connection still holds them, if it is busy with reading. The
// connections' counts are right and dear. So they are asked for when the server's count of open
// calls rises beyond the limit, and after every `most` calls. Not thread-safe.
class PeerCallLimit {
 public:
  // `most`: open calls of all connections. When there are more, connections end until there are
  // `enough`, and those with more than `most_of_one`.
  PeerCallLimit(std::uint64_t most, std::uint64_t enough, std::uint64_t most_of_one)
      : most_(most), enough_(enough), most_of_one_(most_of_one) {}

  // `counted`: by the server. True: ask for the connections' counts, too, and call ToEnd().
  bool NeedsConnections(const CallCounts& counted) {
    // Some have ended after all, such as those of a connection that was closed meanwhile.
    never_end_ = std::min(never_end_, counted.open());
    return counted.open() > never_end_ + most_ || counted.started > looked_at_started_ + most_;
  }

  // The connections to end, those with the most open calls first. `counted`: by the server, before
  // the connections.
  std::vector<ConnectionCalls> ToEnd(const CallCounts& counted,
                                     std::vector<ConnectionCalls> connections) {
    std::uint64_t open = 0;
    for (const ConnectionCalls& connection : connections) open += connection.calls.open();
    never_end_ = counted.open() > open ? counted.open() - open : 0;
    looked_at_started_ = counted.started;
    if (open <= most_) return {};
    std::sort(connections.begin(), connections.end(),
              [](const auto& a, const auto& b) { return a.calls.open() > b.calls.open(); });
    std::size_t chosen = 0;
    for (; chosen < connections.size(); ++chosen) {
      const std::uint64_t calls = connections[chosen].calls.open();
      if (open <= enough_ && calls <= most_of_one_) break;
      open -= calls;
    }
    connections.resize(chosen);
    return connections;
  }

 private:
  const std::uint64_t most_;
  const std::uint64_t enough_;
  const std::uint64_t most_of_one_;
  std::uint64_t never_end_ = 0;          // open calls in the server's count alone
  std::uint64_t looked_at_started_ = 0;  // calls that had begun at the last ToEnd()
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_CALL_LIMIT_H_
