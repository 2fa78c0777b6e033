// Limits how many connections to the peer port each caller has open, so that one machine leaves
// room for the others. Ends connections that do harm.
//
// A caller is an address, or a user of this machine: see caller.h. So no user can use up the
// connections of the node's own daemon. The callers of an IPv6 network have a bound together, so
// that a machine which uses many addresses leaves room for other networks. The last places are for
// networks that have few connections, so that a few busy addresses keep nobody out.

#ifndef DAEMON_PEER_CONNECTION_LIMIT_H_
#define DAEMON_PEER_CONNECTION_LIMIT_H_

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/clock.h"
#include "daemon/base/growing_pause.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/rpc/client_input.h"
#include "daemon/rpc/vain_bytes.h"

namespace gradsync::daemon {

// It does not own connections: gRPC closes them, and does not say when. So it checks whether a
// descriptor still names the same socket. Thread-safe.
class ConnectionLimit {
 public:
  struct Bounds {
    std::size_t per_caller = 0;
    std::size_t per_network = 0;
    std::size_t all = 0;
  };
  // One in kReservedPart of all connections is for networks that have fewer than kFew.
  static constexpr std::size_t kReservedPart = 8;
  static constexpr std::size_t kFew = 8;
  // The process's limit of descriptors, less those that the daemon needs itself, is cut in halves.
  // All callers together may use one half. A network may use half of that, and one caller half of
  // what a network may: so it leaves room for its neighbours. The bounds of a caller and of all
  // also have a constant maximum.
  //
  // One user may use the other half (DescriptorQuota). So one user and all callers together leave
  // the daemon what it needs itself. Several users, with their engines and workers, can use up all
  // descriptors. Then DescriptorReserve keeps some for those who ask for health and status.
  static Bounds OfProcess();

  // `clock` outlives it.
  ConnectionLimit(Bounds bounds, const Clock* clock) : bounds_(bounds), clock_(clock) {}

  using Place = CallerPlace;
  // Counts the connection for as long as it is open. `place` is called only if the address alone is
  // no reason to refuse. RESOURCE_EXHAUSTED: the caller, its network, or all callers together would
  // have too many connections; the caller is paused; or another connection from the same port is
  // open. UNAVAILABLE: after EndAll().
  absl::Status Admit(int connection, const sockaddr_storage& other_end,
                     absl::FunctionRef<Place()> place);
  // Ends the connection from this port of an address: `ip` has 4 or 16 bytes, in the network's
  // order. Then the caller is paused: it gets no new connection for a while. False if there is no
  // such connection any more.
  bool End(const std::string& ip, std::uint16_t port);
  // What silent connections may send. A connection is silent while no stream on it has said Hello.
  struct SilentBytes {
    std::uint64_t first = 0;     // one connection, before it is in the set for the first time
    std::uint64_t per_look = 0;  // all connections of a caller, between two calls of EndSilent()
  };
  // If a caller's silent connections have sent too much at two calls in a row, ends those that have
  // sent something, and pauses the caller. One call is not enough: an honest connection, too, is
  // silent after its last stream has ended. `greeted` returns the other ends of the connections
  // that are not silent. It is called only if a caller may have sent too much. Returns the other
  // ends of the connections that it has ended.
  std::vector<TcpEnd> EndSilent(const SilentBytes& most,
                                absl::FunctionRef<std::set<TcpEnd>()> greeted);
  // Ends connections of which too much was read in vain, or that have had a call with too long
  // headers. Pauses their callers. Returns the other ends of the connections that it has ended, and
  // of those that have ended because of a limit in read_bytes.h.
  std::vector<TcpEnd> EndVain(const VainBytes::Most& most);
  // Ends every connection, and refuses new ones.
  void EndAll();
  // The caller with an open connection from this port of an address, as above. nullopt: there is no
  // such connection.
  std::optional<CallerKey> CallerAt(const std::string& ip, std::uint16_t port);
  // The input of the connection from this port of an address, as above, for its streams to write.
  // Null: there is no such connection.
  std::shared_ptr<ClientInput> InputOf(const std::string& ip, std::uint16_t port);
  // The bytes that have come on the connection from this port of an address, as above, and that
  // nobody has read. 0: there is no such connection.
  std::size_t UnreadBytes(const std::string& ip, std::uint16_t port);
  // For each open connection from this port of an address, as above: the address on this side.
  std::vector<sockaddr_storage> OwnEnds(const std::string& ip, std::uint16_t port);

 private:
  struct Open {
    BorrowedSocket socket;
    TcpEnd other_end;
    std::uint64_t received = 0;  // bytes, at the last EndSilent()
    bool greeted = false;        // was in the set of an earlier EndSilent()
    std::shared_ptr<ClientInput> input = std::make_shared<ClientInput>();
    VainBytes vain = {};
    bool refused = false;  // TakeRefusal() has returned true
  };
  // A connection that has brought something since the last EndSilent().
  struct Sender {
    BorrowedSocket socket;
    TcpEnd other_end;
    std::uint64_t bytes = 0;  // since the last EndSilent()
    std::uint64_t first = 0;  // bytes in all, if it has never greeted; otherwise 0
  };
  struct Caller {
    std::vector<Open> open;
    std::uint64_t looked_ns = 0;
    GrowingPause pause;
    bool sent_much = false;  // its silent connections had sent too much at the last EndSilent()
  };
  using Address = std::array<std::uint8_t, 16>;  // an IPv6 address, or a mapped IPv4 address
  using Callers = std::map<CallerKey, Caller>;

  // `ip` as above. If it has another length, returns zeros, which no connection has.
  static Address AddressOf(absl::string_view ip);
  // Calls `found` for each connection from this port of an address that is still open.
  void ForEachLocked(absl::string_view ip, std::uint16_t port,
                     absl::FunctionRef<void(Callers::value_type*, const Open&)> found)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Each of these says why the caller gets no new connection, or OK: the caller is paused; its
  // network, or all callers together, have too many; the caller has too many.
  static absl::Status CheckPause(const Caller& caller, const std::string& who,
                                 std::uint64_t now_ns);
  absl::Status CheckPlacesLocked(const CallerKey& network) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCallerLocked(const Caller& caller, const std::string& who) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::size_t InNetworkLocked(const CallerKey& network) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts what its connections have brought.
  static std::vector<Sender> SendersOf(Caller* caller);
  static bool IsMuch(const std::vector<Sender>& senders, const SilentBytes& most);
  // True once, if the connection has ended because of a limit in read_bytes.h.
  static bool TakeRefusal(Open* one);
  void ForgetClosedLocked(Callers::value_type* caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Also forgets callers that have no connection.
  void ForgetAllClosedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Bounds bounds_;
  const Clock* const clock_;

  Mutex mutex_;
  Callers callers_ ABSL_GUARDED_BY(mutex_);
  std::size_t count_ ABSL_GUARDED_BY(mutex_) = 0;  // connections of all callers
  // Connections by network, of those that have any.
  std::map<CallerKey, std::size_t> networks_ ABSL_GUARDED_BY(mutex_);
  bool all_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t looked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_CONNECTION_LIMIT_H_
