// The thread that accepts connections on both sockets, identifies their processes, answers the side
// socket, sees processes end, and calls the tick.
//
// It sleeps in epoll. It ticks while there is a session, a connection, a client of the side socket
// or a paused listener. It also ticks until the reserve of descriptors is full, and if the last
// tick asked for another one. Otherwise only systemd's watchdog wakes it.

#ifndef DAEMON_RPC_ACCEPT_LOOP_H_
#define DAEMON_RPC_ACCEPT_LOOP_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/base/tenant.h"
#include "daemon/base/unique_fd.h"
#include "daemon/rpc/connect_rate.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/descriptor_reserve.h"
#include "daemon/rpc/listening_socket.h"
#include "daemon/session/session_table.h"

namespace gradsync::daemon {

// Owns its thread and the sockets. One thread calls Start and the destructor. The loop's thread
// calls the hooks.
class AcceptLoop {
 public:
  struct Hooks {
    // Gives a connection of a user to gRPC, which owns the descriptor from then on. Not OK: it is
    // closed.
    std::function<absl::Status(Connections::Admitted connection, const Tenant& user)> connected;
    // Called at each tick, every kTickMs. Returns true to be called again.
    std::function<bool()> tick;
    // Called every `watchdog_period`, unless that is zero.
    std::function<void()> watchdog;
    absl::Duration watchdog_period = absl::ZeroDuration();
  };
  // Milliseconds between two checks of deadlines and leases.
  static constexpr std::uint64_t kTickMs = 50;

  // Starts the thread. `connections` and `sessions` outlive the loop.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Start(ListeningSocket grpc_socket,
                                                           ListeningSocket fd_socket,
                                                           Connections* connections,
                                                           SessionTable* sessions, Hooks hooks);
  // Stops and joins the thread. Closes and removes the sockets.
  ~AcceptLoop();

 private:
  enum class Kind : std::uint8_t {
    kGrpcListener,
    kFdListener,
    kTimer,
    kWatchdog,
    kWake,
    kConnection,
    kProcess,
    kFdClient
  };
  struct Watched {
    Kind kind = Kind::kWake;
    UniqueFd fd;                   // kConnection: a duplicate of gRPC's; kFdClient
    std::uint64_t connection = 0;  // kConnection, kProcess
    ClientProcess caller;
    std::uint64_t deadline_ns = 0;      // kFdClient
    bool answered = false;              // kFdClient: descriptors were sent
    std::shared_ptr<void> descriptors;  // kFdClient: counts them
  };

  AcceptLoop(ListeningSocket grpc_socket, ListeningSocket fd_socket, Connections* connections,
             SessionTable* sessions, Hooks hooks);
  absl::Status Init();
  // False: the kernel refuses, and `watched` is dropped.
  bool Watch(int fd, std::uint32_t events, Watched watched);
  void Forget(std::uint64_t key);
  void Loop();
  void Handle(std::uint64_t key, std::uint32_t events);
  void AcceptFd();
  // Why the side socket may not take a connection now. Empty: it may, and `descriptors` counts it.
  // `scarce`: as set below.
  std::string WhySideRefused(const Tenant& user, bool scarce, std::shared_ptr<void>* descriptors);
  // True if descriptors were sent. Until the client has read them, they count for its user: the
  // kernel lets this daemon's user have only so many on the way, and then nobody gets any.
  bool AnswerFd(Watched* client);
  // Counts a connection on the side socket that has brought no memory.
  void CountInVain(const ClientProcess& caller);
  void ConnectionClosed(std::uint64_t key);
  void ProcessEnded(std::uint64_t key);
  void Tick();
  void ArmTick(bool on);
  // Accepts a connection, or refuses one. False if none waits, or none can be accepted now.
  bool AcceptConnection();
  // Gives the connection to gRPC, or closes it. `scarce`: it uses the reserve of descriptors.
  void AdmitOrRefuse(UniqueFd accepted, bool scarce);
  // Logs and counts a connection that was refused. `message` is a constant.
  void Refused(std::string_view message, const Tenant& user, pid_t pid, absl::string_view why);
  // Why this user may have no connection now. Empty: it may. `scarce`: as set below.
  std::string WhyRefused(const Tenant& user, bool scarce);
  int FdOf(Kind listener) const {
    return listener == Kind::kGrpcListener ? grpc_socket_.fd() : fd_socket_.fd();
  }
  // Sets `scarce` if it uses the reserve of descriptors. A client of the side socket needs as many
  // as a connection: the accepted one, the process, and one for a moment to find its pod.
  UniqueFd Accept(Kind listener, bool* scarce);
  // True if there are descriptors for the rest of a connection. Sets `scarce` as above.
  bool HasDescriptors(bool* scarce);
  void Pause(Kind listener);
  void Resume();
  void ListenTo(Kind listener, bool on);

  ListeningSocket grpc_socket_;
  ListeningSocket fd_socket_;
  Connections* const connections_;
  SessionTable* const sessions_;
  const Hooks hooks_;

  // Used by the loop's thread alone once it runs.
  UniqueFd epoll_;
  UniqueFd timer_;
  UniqueFd watchdog_;
  UniqueFd wake_;
  std::map<std::uint64_t, Watched> watched_;
  std::uint64_t last_key_ = 0;
  std::map<Tenant, std::size_t> fd_clients_;  // only users that have some
  bool ticking_ = false;
  // Out of descriptors: these listeners accept nothing until the next tick.
  std::set<Kind> paused_;
  DescriptorReserve reserve_;
  // Another user's thread may read a new connection (user_servers.h). It reads all that the client
  // has sent, even if the client has closed the connection meanwhile. So a user who connects and
  // closes without end takes time from all. A job that begins needs one connection for each rank.
  ConnectRate rate_;
  // The side socket counts only connections that bring no memory. It leaves out those that
  // are refused because the daemon has few descriptors. An honest session makes one connection
  // for each layout, however many it has, and does not try again if one is refused.
  ConnectRate side_rate_;

  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_ACCEPT_LOOP_H_
