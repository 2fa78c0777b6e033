#include "daemon/rpc/user_servers.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/thread.h"
#include "daemon/rpc/asking_service.h"
#include "daemon/rpc/call_counts.h"
#include "daemon/rpc/gradsync_service.h"
#include "daemon/rpc/stream_count.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

constexpr int kStreamsPerConnection = 32;
// What gRPC may hold for a user before it ends streams: for what has no session yet, and for each
// session, whose connection has buffers of about 64 KiB.
constexpr std::size_t kQuotaBytes = std::size_t{64} << 20;
constexpr std::size_t kQuotaBytesPerSession = 128 << 10;
// The threads of sessions_ and asking_.
constexpr int kThreads = 3;
// The most that is read from a connection at a time. Messages have as much.
constexpr int kReadBytes = 64 << 10;
// A server without a connection is ended after this.
constexpr std::uint64_t kIdleServerNs = 30'000'000'000;

// All services that stop together share it.
std::chrono::steady_clock::time_point StopDeadline() {
  return std::chrono::steady_clock::now() + kStopPatience;
}

}  // namespace

// The server of one user.
class UserServers::Server {
 public:
  // INTERNAL: gRPC does not start it. RESOURCE_EXHAUSTED: the daemon may have no more threads.
  static absl::StatusOr<std::shared_ptr<Server>> Start(const Environment& environment,
                                                       const Tenant& user) {
    absl::StatusOr<std::shared_ptr<Server>> server = OutOfThreads();
    StartWhatIsCounted(kThreads, [&] { server = StartNow(environment, user); });
    return server;
  }

  Server(const Environment& environment, const Tenant& user)
      : user_(user),
        sessions_(environment.sessions, environment.connections),
        asking_(environment.introspection, environment.connections, environment.answerer),
        connections_(
            MemoryAccount{environment.sessions.memory, user},
            kOpenCalls + 3 * environment.sessions.sessions->policy().quota_sessions_per_user) {}

  // A connection comes. Called right before Connect(), by the same thread.
  absl::Status Expect(const Connections::Admitted& connection) {
    return connections_.Expect(connection.for_grpc.get(), connection.quota, connection.input);
  }
  // May read the connection for gRPC, for as long as there is something to read.
  void Connect(UniqueFd connection) {
    MutexLock lock(&stop_mutex_);
    if (server_ == nullptr) return;
    grpc::AddInsecureChannelFromFd(server_.get(), connection.release());
  }
  // Thread-safe. False: there is nothing to watch before the next Expect().
  bool Watch(std::uint64_t now_ns) { return connections_.Watch(counted_, now_ns); }
  void Drain() { asking_.StopServing(); }
  void Tick(std::uint64_t now_ns) {
    sessions_.Tick(now_ns);
    asking_.Tick(now_ns);
  }
  const Tenant& user() const { return user_; }
  const CountedServer& counted() const { return counted_; }
  GradsyncService& sessions() { return sessions_; }

  // The first half of its end: ends every connection and call. Not after Stop().
  void Shutdown() {
    connections_.EndAll();
    server_->Shutdown(std::chrono::system_clock::now());
  }
  // All of its end. Thread-safe and idempotent. Waits for streams until `deadline`.
  void Stop(std::chrono::steady_clock::time_point deadline) {
    MutexLock lock(&stop_mutex_);
    if (server_ == nullptr) return;
    Shutdown();
    sessions_.Stop(deadline);
    asking_.Stop(deadline);
    server_->Wait();
    server_.reset();
    stopped_.store(true);
  }
  bool stopped() const { return stopped_.load(); }

  // Used by Tick() alone.
  std::uint64_t unused_since_ns = 0;  // 0: it is used

 private:
  static absl::StatusOr<std::shared_ptr<Server>> StartNow(const Environment& environment,
                                                          const Tenant& user) {
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
    // Otherwise gRPC keeps 7 KiB for each further ping of a client that does not read the answers.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
    // Otherwise each look at the counts would also write down the server's history.
    builder.AddChannelArgument(GRPC_ARG_MAX_CHANNEL_TRACE_EVENT_MEMORY_PER_NODE, 0);
    const std::size_t sessions = environment.sessions.sessions->policy().quota_sessions_per_user;
    builder.SetResourceQuota(grpc::ResourceQuota(absl::StrCat("user ", user.Text()))
                                 .Resize(kQuotaBytes + sessions * kQuotaBytesPerSession));
    server->sessions_.Register(&builder);
    server->asking_.Register(&builder);
    server->server_ = builder.BuildAndStart();
    if (server->server_ == nullptr) {
      server->sessions_.Stop(StopDeadline());
      server->asking_.Stop(StopDeadline());
      return absl::InternalError("gRPC's server did not start");
    }
    server->counted_ = CountedServer::Newest();
    try {
      server->sessions_.Start();
      server->asking_.Start();
    } catch (const std::system_error&) {
      server->Stop(StopDeadline());
      return OutOfThreads();
    }
    return server;
  }

  const Tenant user_;
  GradsyncService sessions_;
  AskingService asking_;
  std::unique_ptr<grpc::Server> server_;
  CountedServer counted_;  // constant once started
  UserConnections connections_;
  Mutex stop_mutex_;
  std::atomic<bool> stopped_{false};
};

UserServers::UserServers(Environment environment)
    : environment_(WithSources(std::move(environment))),
      watcher_(environment_.watch_period, [this] { return Watch(); }),
      connectors_(std::make_unique<ThreadPerUser>()) {}
UserServers::~UserServers() = default;

UserServers::Environment UserServers::WithSources(Environment environment) {
  environment.introspection.connections = environment.connections;
  environment.introspection.open_calls = [this](TenantFilter wanted) { return OpenCalls(wanted); };
  return environment;
}

std::map<Tenant, std::uint64_t> UserServers::OpenCalls(TenantFilter wanted) const {
  std::map<Tenant, CountedServer> counted;
  {
    MutexLock lock(&mutex_);
    for (const auto& [user, server] : servers_) {
      if (wanted(user)) counted[user] = server->counted();
    }
  }
  std::map<Tenant, std::uint64_t> calls;
  for (const auto& [user, server] : counted) calls[user] = server.Calls().open();
  return calls;
}

absl::StatusOr<std::shared_ptr<UserServers::Server>> UserServers::ServerOf(const Tenant& user) {
  MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("the daemon is stopping");
  if (const auto found = servers_.find(user); found != servers_.end()) return found->second;
  const bool beside = user.pod.none() && (user.uid == 0 || user.uid == geteuid());
  if (servers_.size() >= kMaxUsers && !beside) {
    return absl::ResourceExhaustedError(
        absl::StrCat(servers_.size(), " users are connected, as many as may be at a time"));
  }
  // Before the server, and for as long: when the daemon may have no more threads, the user's next
  // connections need none.
  if (absl::Status kept = connectors_->Keep(user); !kept.ok()) return kept;
  auto server = Server::Start(environment_, user);
  if (!server.ok()) {
    connectors_->Release(user);
    return server;
  }
  if (draining_) (*server)->Drain();
  servers_[user] = *server;
  return server;
}

absl::Status UserServers::Connect(Connections::Admitted connection, const Tenant& user) {
  auto server = ServerOf(user);
  if (!server.ok()) return server.status();
  return connectors_->Run(
      user, [this, server = *std::move(server),
             connection = std::make_shared<Connections::Admitted>(std::move(connection))] {
        HandOver(server, connection.get());
      });
}

void UserServers::HandOver(const std::shared_ptr<Server>& server,
                           Connections::Admitted* connection) {
  if (absl::Status expected = server->Expect(*connection); !expected.ok()) {
    environment_.connections->CountRefused(server->user());
    LogLimited(LogLevel::kWarning, "connection refused",
               {{"uid", server->user()}, {"why", expected.message()}});
    shutdown(connection->for_grpc.get(), SHUT_RDWR);  // the accept loop sees its end
    return;
  }
  watcher_.Wake();
  server->Connect(std::move(connection->for_grpc));
  // It may have brought many calls, and many such connections may come before the watcher looks.
  server->Watch(MonotonicNowNs());
}

bool UserServers::Watch() {
  bool again = false;
  for (const auto& server : Servers()) again = server->Watch(MonotonicNowNs()) || again;
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
        if (!stopped_) connectors_->Release(it->first);
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
    environment_.reaper->Run([server] { server->Stop(StopDeadline()); });
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
  auto servers = Servers();
  for (const auto& server : servers) server->Shutdown();  // ends hand-overs too
  connectors_ = nullptr;
  watcher_.Stop();
  {
    MutexLock lock(&mutex_);
    servers.insert(servers.end(), ending_.begin(), ending_.end());
    servers_.clear();
    ending_.clear();
  }
  const auto deadline = StopDeadline();
  for (const auto& server : servers) server->Stop(deadline);
}

}  // namespace gradsync::daemon
