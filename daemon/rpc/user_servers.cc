#include "daemon/rpc/user_servers.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/thread.h"
#include "daemon/rpc/asking_service.h"
#include "daemon/rpc/call_counts.h"
#include "daemon/rpc/call_limit.h"
#include "daemon/rpc/gradsync_service.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

constexpr int kStreamsPerConnection = 32;
constexpr int kIdleConnectionMs = 30'000;
// What gRPC may hold for a user before it ends streams: for what has no session yet, and for each
// session, whose connection has buffers of about 64 KiB.
constexpr std::size_t kQuotaBytes = std::size_t{64} << 20;
constexpr std::size_t kQuotaBytesPerSession = 128 << 10;
// Of sessions_ and asking_.
constexpr int kThreads = 3;
// The most that is read from a connection at a time. Messages have as much.
constexpr int kReadBytes = 64 << 10;
// A server without a connection is ended after this.
constexpr std::uint64_t kIdleServerNs = 30'000'000'000;
// The connections are looked at at least so often, to forget those that have ended.
constexpr std::uint64_t kLookNs = 1'000'000'000;
// After too many calls a user gets no connection until there have been few calls for so long.
// Otherwise a client that connects again at once brings as many in the next moment.
constexpr std::uint64_t kQuietNs = 1'000'000'000;

// If a user has too many calls, these connections stay: with so many calls or fewer, open and begun
// since the last look, and with so little to read.
constexpr std::uint64_t kModestCalls = 16;
constexpr std::size_t kModestBytes = 4 << 10;

CallLimit LimitOf(const SessionPolicy& policy) {
  return CallLimit(UserServers::kOpenCalls + 3 * policy.quota_sessions_per_user, 0, 0);
}

}  // namespace

// The server of one user.
class UserServers::Server {
 public:
  // INTERNAL: gRPC does not start it. RESOURCE_EXHAUSTED: the daemon may have no more threads.
  static absl::StatusOr<std::shared_ptr<Server>> Start(const Environment& environment,
                                                       const Tenant& user) {
    if (!CanStartThreads(kThreads)) return OutOfThreads();
    auto server = std::make_shared<Server>(environment, user);
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
    // gRPC limits a message before and after it decompresses it, not meanwhile.
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    // Otherwise a connection without a call keeps its descriptors for ever.
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
    // Otherwise the windows of streams grow, and many honest streams can exceed the quota together.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    // Otherwise one read may bring more calls than a user may have.
    builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadBytes);
    // Otherwise each look at the counts would also write down the server's history.
    builder.AddChannelArgument(GRPC_ARG_MAX_CHANNEL_TRACE_EVENT_MEMORY_PER_NODE, 0);
    const std::size_t sessions = environment.sessions.sessions->policy().quota_sessions_per_user;
    builder.SetResourceQuota(grpc::ResourceQuota(absl::StrCat("user ", user.Text()))
                                 .Resize(kQuotaBytes + sessions * kQuotaBytesPerSession));
    server->sessions_.Register(&builder);
    server->asking_.Register(&builder);
    server->server_ = builder.BuildAndStart();
    if (server->server_ == nullptr) {
      server->sessions_.Stop();
      server->asking_.Stop();
      return absl::InternalError("gRPC's server did not start");
    }
    server->counted_ = CountedServer::Newest();
    try {
      server->sessions_.Start();
      server->asking_.Start();
    } catch (const std::system_error&) {
      server->Stop();
      return OutOfThreads();
    }
    return server;
  }

  Server(const Environment& environment, const Tenant& user)
      : user_(user),
        sessions_(environment.sessions, environment.connections),
        asking_(environment.introspection, environment.connections, environment.answerer),
        call_limit_(LimitOf(environment.sessions.sessions->policy())) {}

  // A connection comes. Called right before Connect(). RESOURCE_EXHAUSTED: there may be no new one.
  absl::Status Expect(const UniqueFd& connection) {
    if (refuses_.load()) {
      return absl::ResourceExhaustedError("the user's calls that are too many have not ended yet");
    }
    MutexLock lock(&expected_mutex_);
    expected_.push_back(
        {CountedConnection::Next(connection.get()), BorrowedSocket(connection.get())});
    return absl::OkStatus();
  }
  // May read the connection for gRPC, for as long as there is something to read.
  void Connect(UniqueFd connection) {
    grpc::AddInsecureChannelFromFd(server_.get(), connection.release());
  }
  // Ends connections if the user has too many open calls. False: there is
  // nothing to watch before the next connection. Called by the watcher alone.
  bool WatchCalls(std::uint64_t now_ns) {
    {
      MutexLock lock(&expected_mutex_);
      std::move(expected_.begin(), expected_.end(), std::back_inserter(connected_));
      expected_.clear();
    }
    if (connected_.empty() && !refuses_.load()) return false;
    const CallCounts counted = counted_.Calls();
    if (refuses_.load() || now_ns > looked_ns_ + kLookNs || call_limit_.NeedsConnections(counted)) {
      looked_ns_ = now_ns;
      if (EndTooMany(counted)) exceeded_ns_ = now_ns;
      refuses_.store(exceeded_ns_ != 0 && now_ns < exceeded_ns_ + kQuietNs);
    }
    return true;
  }
  void Drain() { asking_.StopServing(); }
  void Tick(std::uint64_t now_ns) {
    sessions_.Tick(now_ns);
    asking_.Tick(now_ns);
  }
  GradsyncService& sessions() { return sessions_; }

  // The two halves of its end: the first one cancels every call, the second one waits.
  void Shutdown() { server_->Shutdown(std::chrono::system_clock::now()); }
  // Thread-safe and idempotent. Includes the first half.
  void Stop() {
    MutexLock lock(&stop_mutex_);
    if (server_ == nullptr) return;
    Shutdown();
    sessions_.Stop();
    asking_.Stop();
    server_->Wait();
    server_.reset();
    stopped_.store(true);
  }
  bool stopped() const { return stopped_.load(); }

  // Used by Tick() alone.
  std::uint64_t unused_since_ns = 0;  // 0: it is used

 private:
  struct Connected {
    // True if it has hardly a part in too many calls, as a trainer's.
    bool IsModest() const {
      return now.open() <= kModestCalls && now.started <= before.started + kModestCalls &&
             socket.UnreadBytes() <= kModestBytes;
    }

    CountedConnection counted;
    BorrowedSocket socket;
    CallCounts before = {};  // at the last look but one
    CallCounts now = {};     // at the last look
    bool ended = false;      // by us
  };

  // Looks at each connection. True: there are too many calls.
  bool EndTooMany(const CallCounts& counted) {
    std::vector<std::uint64_t> open;
    std::size_t kept = 0;
    for (Connected& connection : connected_) {
      const auto calls = connection.counted.Calls();
      // gRPC closes the descriptor before it destroys the connection.
      if (!calls && !connection.socket.IsOpen()) continue;
      connection.before = std::exchange(connection.now, calls.value_or(CallCounts{}));
      open.push_back(connection.now.open());
      if (&connected_[kept] != &connection) connected_[kept] = std::move(connection);
      ++kept;
    }
    connected_.resize(kept);
    if (call_limit_.ToEnd(counted, open).empty()) return false;
    std::size_t ended = 0;
    std::uint64_t calls = 0;
    for (Connected& connection : connected_) {
      if (connection.ended || connection.IsModest()) continue;
      connection.ended = connection.socket.End();
      if (!connection.ended) continue;
      ++ended;
      calls += connection.now.open();
    }
    if (ended == 0) return true;
    LogLimited(LogLevel::kWarning, "connections ended",
               {{"user", user_.Text()},
                {"connections", ended},
                {"calls", calls},
                {"why", "the user has more open calls than a user may have"}});
    return true;
  }

  const Tenant user_;
  GradsyncService sessions_;
  AskingService asking_;
  std::unique_ptr<grpc::Server> server_;
  CountedServer counted_;  // constant once started
  std::atomic<bool> refuses_{false};
  Mutex expected_mutex_;
  std::vector<Connected> expected_ ABSL_GUARDED_BY(expected_mutex_);  // since the last look
  // The watcher's.
  std::vector<Connected> connected_;
  CallLimit call_limit_;
  std::uint64_t looked_ns_ = 0;
  std::uint64_t exceeded_ns_ = 0;  // 0: never

  Mutex stop_mutex_;
  std::atomic<bool> stopped_{false};
};

UserServers::UserServers(Environment environment)
    : environment_(std::move(environment)),
      watcher_(kWatchPeriod, [this] { return WatchCalls(); }) {}
UserServers::~UserServers() = default;

absl::StatusOr<std::shared_ptr<UserServers::Server>> UserServers::ServerOf(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("the daemon is stopping");
  if (const auto found = servers_.find(user); found != servers_.end()) return found->second;
  const bool beside = user.pod.none() && (user.uid == 0 || user.uid == geteuid());
  if (servers_.size() >= kMaxUsers && !beside) {
    return absl::ResourceExhaustedError(
        absl::StrCat(servers_.size(), " users are connected, as many as may be at a time"));
  }
  auto server = Server::Start(environment_, user);
  if (!server.ok()) return server;
  if (draining_) (*server)->Drain();
  servers_[user] = *server;
  return server;
}

absl::Status UserServers::Connect(UniqueFd connection, const Tenant& user) {
  auto server = ServerOf(user);
  if (!server.ok()) return server.status();
  if (absl::Status expected = (*server)->Expect(connection); !expected.ok()) return expected;
  watcher_.Wake();
  (*server)->Connect(std::move(connection));
  return absl::OkStatus();
}

bool UserServers::WatchCalls() {
  bool again = false;
  for (const auto& server : Servers()) again = server->WatchCalls(MonotonicNowNs()) || again;
  return again;
}

std::vector<std::shared_ptr<UserServers::Server>> UserServers::Servers() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Server>> servers;
  for (const auto& entry : servers_) servers.push_back(entry.second);
  return servers;
}

bool UserServers::Tick(std::uint64_t now_ns) {
  for (const auto& server : Servers()) server->Tick(now_ns);
  std::vector<std::shared_ptr<Server>> unused;
  bool any = false;
  {
    MutexLock lock(&mutex_);
    for (auto it = servers_.begin(); it != servers_.end();) {
      Server& server = *it->second;
      const bool used = environment_.connections->Count(it->first) > 0 || !server.sessions().Idle();
      if (used) {
        server.unused_since_ns = 0;
      } else if (server.unused_since_ns == 0) {
        server.unused_since_ns = now_ns;
      }
      if (!used && now_ns > server.unused_since_ns + kIdleServerNs) {
        unused.push_back(std::move(it->second));
        it = servers_.erase(it);
      } else {
        ++it;
      }
    }
    ending_.erase(std::remove_if(ending_.begin(), ending_.end(),
                                 [](const auto& server) { return server->stopped(); }),
                  ending_.end());
    ending_.insert(ending_.end(), unused.begin(), unused.end());
    any = !servers_.empty() || !ending_.empty();
  }
  for (auto& server : unused) {
    environment_.reaper->Run([server] {
      server->Shutdown();
      server->Stop();
    });
  }
  return any;
}

void UserServers::Drain() {
  {
    MutexLock lock(&mutex_);
    draining_ = true;
  }
  for (const auto& server : Servers()) server->Drain();
}

bool UserServers::Idle() {
  for (const auto& server : Servers()) {
    if (!server->sessions().Idle()) return false;
  }
  return true;
}

void UserServers::Stop() {
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
  }
  watcher_.Stop();
  auto servers = Servers();
  for (const auto& server : servers) server->Shutdown();
  {
    MutexLock lock(&mutex_);
    servers.insert(servers.end(), ending_.begin(), ending_.end());
    servers_.clear();
    ending_.clear();
  }
  for (const auto& server : servers) server->Stop();
}

}  // namespace gradsync::daemon
