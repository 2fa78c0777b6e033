#include "daemon/rpc/user_calls.h"

#include <cstddef>
#include <iterator>
#include <utility>

#include "daemon/base/logging.h"

namespace gradsync::daemon {
namespace {

// The connections are looked at at least so often, to forget those that have ended.
constexpr std::uint64_t kLookNs = 1'000'000'000;
// After too many calls a user gets no connection until there have been few calls for so long.
// Otherwise a client that connects again at once brings as many in the next moment.
constexpr std::uint64_t kQuietNs = 1'000'000'000;
// If there are too many calls, these connections stay: with so many or fewer, open and begun since
// the last look, and with so little to read.
constexpr std::uint64_t kModestCalls = 16;
constexpr std::size_t kModestBytes = 4 << 10;

}  // namespace

UserCalls::UserCalls(std::string user, std::uint64_t most)
    : user_(std::move(user)), limit_(most, 0, 0) {}

absl::Status UserCalls::Expect(int descriptor) {
  if (refuses_.load()) {
    return absl::ResourceExhaustedError("the user's calls that are too many have not ended yet");
  }
  MutexLock lock(&mutex_);
  expected_.push_back({CountedConnection::Next(descriptor), BorrowedSocket(descriptor)});
  return absl::OkStatus();
}

bool UserCalls::Watch(const CountedServer& server, std::uint64_t now_ns) {
  {
    MutexLock lock(&mutex_);
    std::move(expected_.begin(), expected_.end(), std::back_inserter(connections_));
    expected_.clear();
  }
  if (connections_.empty() && !refuses_.load()) return false;
  const CallCounts counted = server.Calls();
  if (refuses_.load() || now_ns > looked_ns_ + kLookNs || limit_.NeedsConnections(counted)) {
    looked_ns_ = now_ns;
    if (EndTooMany(counted)) exceeded_ns_ = now_ns;
    refuses_.store(exceeded_ns_ != 0 && now_ns < exceeded_ns_ + kQuietNs);
  }
  return true;
}

bool UserCalls::Connection::IsModest() const {
  return now.open() <= kModestCalls && now.started <= before.started + kModestCalls &&
         socket.UnreadBytes() <= kModestBytes;
}

bool UserCalls::EndTooMany(const CallCounts& counted) {
  std::vector<Connection> kept;
  std::vector<std::uint64_t> open;
  for (Connection& connection : connections_) {
    const auto calls = connection.counted.Calls();
    // gRPC closes the descriptor before it destroys the connection.
    if (!calls && !connection.socket.IsOpen()) continue;
    connection.before = std::exchange(connection.now, calls.value_or(CallCounts{}));
    open.push_back(connection.now.open());
    kept.push_back(std::move(connection));
  }
  connections_ = std::move(kept);
  if (limit_.ToEnd(counted, open).empty()) return false;
  std::size_t ended = 0;
  std::uint64_t calls = 0;
  for (Connection& connection : connections_) {
    if (connection.ended || connection.IsModest()) continue;
    connection.ended = connection.socket.End();
    if (!connection.ended) continue;
    ++ended;
    calls += connection.now.open();
  }
  if (ended == 0) return true;
  LogLimited(LogLevel::kWarning, "connections ended",
             {{"user", user_},
              {"connections", ended},
              {"calls", calls},
              {"why", "the user has more open calls than a user may have"}});
  return true;
}

}  // namespace gradsync::daemon
