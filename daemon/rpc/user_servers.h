// The gRPC servers behind the daemon's socket: one for each user.
//
// gRPC reads a whole message, however long, before it compares the length with the limit. Only a
// ResourceQuota prevents that, and it may end any stream of its server. So each user has a server
// and a quota: a user who sends too much loses only its own streams. For the same reason the
// threads that handle the messages of streams, and those of status and reflection, belong to one
// user. But gRPC has one epoll set for all servers, so any of these threads may read the bytes of
// any user's connection.
//
// The quota does not see calls. A client that opens calls and resets them at once (CVE-2023-44487)
// fills the memory with calls that wait for the user's threads. So gRPC's counts are looked at
// every kWatchPeriod, and after each new connection: UserConnections.

#ifndef DAEMON_RPC_USER_SERVERS_H_
#define DAEMON_RPC_USER_SERVERS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/thread_per_user.h"
#include "daemon/base/ticker.h"
#include "daemon/base/user_executor.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/introspection_answers.h"
#include "daemon/rpc/session_handler.h"
#include "daemon/rpc/user_connections.h"

namespace gradsync::daemon {

// Thread-safe. Makes a user's server at the user's first connection, and ends it when the user has
// had no connection for a while.
class UserServers {
 public:
  // The most users at a time; a user in a pod counts as a separate user. root and the daemon's own
  // user, outside of pods, are admitted even beyond it.
  static constexpr std::size_t kMaxUsers = 128;
  // How many open calls a user may have, besides three for each session that its quota allows: one
  // with the session, and two that have no session yet. A call takes about 13 KiB.
  static constexpr std::uint64_t kOpenCalls = 1024;
  static constexpr std::chrono::milliseconds kWatchPeriod = UserConnections::kWatchPeriod;

  // What the services need. This class sets `connections` and `open_calls` of `introspection`.
  // `answerer` works out answers for AskingService, and `reaper` waits for servers to end. All of
  // it outlives the servers.
  struct Environment {
    SessionContext sessions;
    IntrospectionContext introspection;
    Connections* connections = nullptr;
    UserExecutor* answerer = nullptr;
    Executor* reaper = nullptr;
    std::chrono::milliseconds watch_period = kWatchPeriod;
  };
  explicit UserServers(Environment environment);
  // Requires Stop(), and that the answerer has done its work after that: it asks for `open_calls`.
  ~UserServers();

  // Gives a connection to its user's server. A thread of the user calls AddInsecureChannelFromFd()
  // later, because gRPC may read from the connection within it, for as long as the client sends.
  // Any thread that polls for gRPC reads the rest. RESOURCE_EXHAUSTED: too many users, or no
  // threads for a new one. INTERNAL: gRPC does not start a server. UNAVAILABLE: after Stop().
  absl::Status Connect(Connections::Admitted connection, const Tenant& user);
  // Cancels the streams that open no session in time. Ends the servers of users without
  // connections. Returns false if there is no server.
  bool Tick(std::uint64_t now_ns);
  // Shows in the health service that the daemon drains.
  void Drain();
  // True if no stream of a trainer is open.
  bool Idle();
  // Ends all servers, and with them every stream. Idempotent.
  void Stop();

 private:
  class Server;

  // `environment`, with what its introspection asks of this object.
  Environment WithSources(Environment environment);
  // The open calls of the users that are wanted, as gRPC counts them.
  std::map<Tenant, std::uint64_t> OpenCalls(TenantFilter wanted) const;
  absl::StatusOr<std::shared_ptr<Server>> ServerOf(const Tenant& user);
  std::vector<std::shared_ptr<Server>> Servers() const;
  void HandOver(const std::shared_ptr<Server>& server, Connections::Admitted* connection);
  // Called by the watcher. False: there is nothing to watch before the next connection.
  bool Watch();

  const Environment environment_;

  mutable Mutex mutex_;
  std::map<Tenant, std::shared_ptr<Server>> servers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Server>> ending_ ABSL_GUARDED_BY(mutex_);  // the reaper has them
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;

  Ticker watcher_;
  // Runs HandOver(). Keeps the thread of each user in servers_. Null once stopped.
  std::unique_ptr<ThreadPerUser> connectors_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_USER_SERVERS_H_
