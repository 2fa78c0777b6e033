#include "daemon/rpc/user_connections.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/logging.h"

namespace gradsync::daemon {
namespace {

// Prune() takes four system calls for each connection. So it runs only once in this time, and when
// many connections have come.
constexpr std::uint64_t kPruneNs = 1'000'000'000;
constexpr std::size_t kMany = 64;
// A look that is older says nothing about the calls that a connection has begun just now.
constexpr std::uint64_t kRecentNs = 1'000'000'000;
constexpr std::uint64_t kWatchPeriodNs =
    std::chrono::nanoseconds(UserConnections::kWatchPeriod).count();

}  // namespace

UserConnections::UserConnections(const MemoryAccount& account, std::uint64_t most)
    : account_(account), limit_({/*most=*/most, /*enough=*/most, /*most_of_one=*/kFewCalls}) {}

absl::Status UserConnections::Expect(int descriptor, std::shared_ptr<void> quota,
                                     std::shared_ptr<const ClientInput> input) {
  if (pauses_.load()) {
    return absl::ResourceExhaustedError(
        "connections of the user did harm; try again in some seconds, at most 32");
  }
  Connection expected{CountedConnection::Next(descriptor), BorrowedSocket(descriptor),
                      std::move(quota), std::move(input)};
  expected.socket.LimitHeaders(HeaderFrames());
  MutexLock lock(&mutex_);
  if (all_ended_) return absl::UnavailableError("the daemon is stopping");
  expected_.push_back(std::move(expected));
  return absl::OkStatus();
}

bool UserConnections::Watch(const CountedServer& server, std::uint64_t now_ns) {
  MutexLock lock(&watch_mutex_);
  TakeExpected();
  const bool prunes =
      now_ns >= pruned_ns_ + kPruneNs || connections_.size() > 2 * pruned_to_ + kMany;
  // First, because Prune() forgets connections that have ended.
  if ((prunes || now_ns >= headers_ns_ + kWatchPeriodNs) && EndLongHeaders(now_ns)) {
    pause_.Extend(now_ns);
    pauses_.store(true);
  }
  if (prunes) Prune(now_ns);
  if (connections_.empty() && !pauses_.load()) return false;
  const CallCounts counted = server.Calls();
  if (pauses_.load() || limit_.NeedsConnections(counted)) {
    if (EndBusiest(counted, now_ns)) pause_.Extend(now_ns);
    pauses_.store(pause_.Lasts(now_ns));
  }
  return true;
}

void UserConnections::EndAll() {
  MutexLock lock(&watch_mutex_);
  {
    MutexLock expecting(&mutex_);
    all_ended_ = true;
  }
  TakeExpected();
  for (const Connection& connection : connections_) connection.socket.End();
}

void UserConnections::TakeExpected() {
  MutexLock lock(&mutex_);
  std::move(expected_.begin(), expected_.end(), std::back_inserter(connections_));
  expected_.clear();
}

void UserConnections::Prune(std::uint64_t now_ns) {
  // Once the descriptor is closed, the connection and the last of its calls are destroyed.
  connections_.erase(
      std::remove_if(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return !connection.socket.IsOpen(); }),
      connections_.end());
  for (Connection& connection : connections_) {
    if (connection.closed_ns != 0) {
      if (now_ns >= connection.closed_ns + kClosingNs) connection.socket.End();
    } else if (connection.socket.ClientHasClosed()) {
      connection.closed_ns = now_ns;
    }
  }
  ChargeUnread(now_ns);
  pruned_to_ = connections_.size();
  pruned_ns_ = now_ns;
}

void UserConnections::ChargeUnread(std::uint64_t now_ns) {
  std::size_t ended = 0;
  std::string why;
  for (Connection& connection : connections_) {
    if (!connection.socket.IsFull()) {
      connection.full_ns = 0;
      connection.unread = ArenaQuota::Reservation();
      continue;
    }
    if (connection.full_ns == 0) connection.full_ns = now_ns;
    const bool lasts = now_ns >= connection.full_ns + kUnreadNs;
    if (!lasts || connection.ended || connection.unread.bytes() > 0) continue;
    auto charge = account_.Reserve(kUnreadBytes);
    if (charge.ok()) {
      connection.unread = *std::move(charge);
    } else if (connection.ended = connection.socket.End(); connection.ended) {
      ++ended;
      why = std::string(charge.status().message());
    }
  }
  if (ended == 0) return;
  LogLimited(LogLevel::kWarning, "connections ended",
             {{"uid", account_.user},
              {"connections", ended},
              {"why", absl::StrCat("their clients do not read what the daemon sends; ", why)}});
}

bool UserConnections::EndLongHeaders(std::uint64_t now_ns) {
  headers_ns_ = now_ns;
  std::uint64_t unfinished = 0;
  for (const Connection& connection : connections_) {
    if (!connection.ended) unfinished += connection.socket.Headers().unfinished;
  }
  std::size_t ended = 0;
  for (Connection& connection : connections_) {
    if (connection.ended) continue;
    const HeaderState headers = connection.socket.Headers();
    const bool slow = unfinished > kMostUnfinished && headers.unfinished > 0;
    if (!headers.refused && !slow && !connection.input->long_headers.load()) continue;
    // It counts also if the client has closed it: a client could do so, and connect again.
    connection.socket.End();
    connection.ended = true;
    ++ended;
  }
  if (ended == 0) return false;
  LogLimited(LogLevel::kWarning, "connections ended",
             {{"uid", account_.user},
              {"connections", ended},
              {"why",
               "their headers are too long, have no end or follow messages, they reset too many "
               "calls, or they send too much that is no data"}});
  return true;
}

bool UserConnections::Connection::HasFewCalls() const {
  return now.open() <= kFewCalls && now.started <= before.started + kFewCalls &&
         socket.UnreadBytes() <= kFewBytes;
}

bool UserConnections::EndBusiest(const CallCounts& counted, std::uint64_t now_ns) {
  const bool recent = now_ns < looked_ns_ + kRecentNs;
  const bool marks = !recent || now_ns >= marked_ns_ + kWatchPeriodNs;
  looked_ns_ = now_ns;
  if (marks) marked_ns_ = now_ns;
  std::vector<std::uint64_t> open;
  for (Connection& connection : connections_) {
    connection.now = {};
    // A connection that gRPC has not made yet, or has destroyed, has no calls.
    if (connection.socket.IsOpen()) {
      connection.now = connection.counted.Calls().value_or(CallCounts{});
    }
    if (marks) connection.before = std::exchange(connection.marked, connection.now);
    if (!recent) connection.before = connection.now;
    open.push_back(connection.now.open());
  }
  const std::vector<std::size_t> busiest = limit_.ToEnd(counted, open);
  if (busiest.empty()) return false;
  std::vector<bool> end(connections_.size());
  for (const std::size_t place : busiest) end[place] = true;
  std::size_t ended = 0;
  std::uint64_t calls = 0;
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = connections_[i];
    if (connection.ended || (!end[i] && connection.HasFewCalls())) continue;
    connection.ended = connection.socket.End();
    if (!connection.ended) continue;
    ++ended;
    calls += connection.now.open();
  }
  if (ended == 0) return true;
  LogLimited(LogLevel::kWarning, "connections ended",
             {{"uid", account_.user},
              {"connections", ended},
              {"calls", calls},
              {"why", "the user has more open calls than a user may have"}});
  return true;
}

}  // namespace gradsync::daemon
