// Accepts the TCP connections of other nodes' daemons.
//
// gRPC's own loop never accepts again on a port after the process has once run out of descriptors
// (CVE-2023-4785). This one tries again.

#ifndef DAEMON_PEER_PEER_LISTENER_H_
#define DAEMON_PEER_PEER_LISTENER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/peer/connection_limit.h"
#include "daemon/peer/peer_address.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/vain_bytes.h"
#include "daemon/session/descriptor_quota.h"

namespace gradsync::daemon {

// Owns its sockets and its thread. Legal calls: Listen Start Stop, by one thread. The destructor
// stops too.
class PeerListener {
 public:
  // Binds every address of the host, all to one port: a free one if it is 0. Closes connections
  // beyond the bounds. UNAVAILABLE: it cannot listen there.
  static absl::StatusOr<std::unique_ptr<PeerListener>> Listen(
      const PeerAddress& address, ConnectionLimit::Bounds bounds = ConnectionLimit::OfProcess());
  ~PeerListener();
  PeerListener(const PeerListener&) = delete;
  PeerListener& operator=(const PeerListener&) = delete;

  std::uint16_t port() const { return port_; }

  // Accepts nothing while descriptors are scarce. Called before Start(). `quota` outlives it.
  void LimitDescriptors(const DescriptorQuota* quota) { descriptors_ = quota; }
  // Limits headers, calls, resets, and bytes that are no data: see read_bytes.h. Called before
  // Start(), and only if connections have no TLS. `most_calls`: not 0.
  void LimitHeaders(std::uint32_t most_calls) { most_calls_ = most_calls; }
  // Starts to accept. `connected` is called by the listener's thread, and owns the descriptor. The
  // call may last for as long as the other node sends: see EndSlow().
  void Start(std::function<void(UniqueFd connection)> connected);
  // As ConnectionLimit::End(). Thread-safe.
  bool End(const std::string& ip, std::uint16_t port) { return limit_.End(ip, port); }
  // As ConnectionLimit::EndSilent(). Thread-safe.
  std::vector<TcpEnd> EndSilent(const ConnectionLimit::SilentBytes& most,
                                absl::FunctionRef<std::set<TcpEnd>()> greeted) {
    return limit_.EndSilent(most, greeted);
  }
  // As ConnectionLimit::EndVain(). Thread-safe.
  std::vector<TcpEnd> EndVain(const VainBytes::Most& most) { return limit_.EndVain(most); }
  // As End(), for the connection whose `connected` lasts for longer than `limit_ns`, and which has
  // sent more than `few` bytes: otherwise it is this machine that is slow. Thread-safe.
  void EndSlow(std::uint64_t limit_ns, std::uint64_t few);
  // The CallerKey of a connection, from the address of its other end, as gRPC names it.
  // Thread-safe.
  CallerKey CallerAt(absl::string_view address);
  // As ConnectionLimit::InputOf(), for a caller, as gRPC names it. Thread-safe.
  std::shared_ptr<ClientInput> InputOf(absl::string_view caller);
  // As ConnectionLimit::UnreadBytes(), for a caller, as gRPC names it. Thread-safe.
  std::size_t UnreadBytes(absl::string_view caller);
  // This process's ends of its connections with a caller, as gRPC names it. Thread-safe.
  std::vector<TcpEnd> OwnEnds(absl::string_view caller);
  // Accepts no more, and ends every connection. Idempotent.
  void Stop();

 private:
  explicit PeerListener(ConnectionLimit::Bounds bounds) : limit_(bounds, &clock_) {}
  void Loop();
  // Accepts one connection. Returns what the process or the machine lacks to accept it; empty if it
  // lacks nothing, even if the connection was refused.
  std::string Accept(int socket);

  // Constant once started.
  std::vector<UniqueFd> sockets_;
  UniqueFd stop_;  // readable: stop
  std::uint16_t port_ = 0;
  const DescriptorQuota* descriptors_ = nullptr;  // null: never scarce
  std::uint32_t most_calls_ = 0;                  // of a connection; 0: headers have no limit
  std::function<void(UniqueFd connection)> connected_;

  const MonotonicClock clock_;
  ConnectionLimit limit_;
  Mutex mutex_;
  // The connection and its other end, while `connected` runs.
  BorrowedSocket connecting_socket_ ABSL_GUARDED_BY(mutex_);
  TcpEnd connecting_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t connecting_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // since when; 0: it does not run
  std::thread thread_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_LISTENER_H_
