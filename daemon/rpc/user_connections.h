// The connections that a user's gRPC server has.

#ifndef DAEMON_RPC_USER_CONNECTIONS_H_
#define DAEMON_RPC_USER_CONNECTIONS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/growing_pause.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/rpc/call_counts.h"
#include "daemon/rpc/call_limit.h"
#include "daemon/rpc/client_input.h"

namespace gradsync::daemon {

// The connections of one user. It knows a connection until gRPC has closed it. That can be long
// after the client has closed its end: gRPC first reads what is left, and finishes a write that the
// client does not read. So this class ends connections
//
// - when too many calls are open: it ends the busiest ones. Then the user gets no new connection
//   for a while (a pause): otherwise a client would connect again and bring as many calls;
// - a while after the client has closed its end;
// - when the client leaves answers unread, and their memory does not fit the user's quota;
// - when it exceeds a limit of HeaderFrames, or the headers of one of its calls are too long;
// - when the unfinished headers of all connections together are too long: it ends each connection
//   that has some. gRPC keeps headers in memory, and does not limit them. In this case and the one
//   before, the user is paused, too;
// - when the server stops.
//
// Thread-safe.
class UserConnections {
 public:
  // How long a connection may stay after its client has closed its end.
  static constexpr std::uint64_t kClosingNs = 1'000'000'000;
  // How often the owner calls Watch(), at least.
  static constexpr std::chrono::milliseconds kWatchPeriod{50};
  // When there are too many calls, a connection may stay if it has at most kFewCalls open, has
  // begun at most kFewCalls lately, and has at most kFewBytes to read. Lately: since a look at the
  // calls that is at least kWatchPeriod old, because a newer one may have come right after a burst
  // of calls; or since the first look, if that is younger. A look more than a second after the one
  // before is a first one: no call counts as begun lately.
  static constexpr std::uint64_t kFewCalls = 16;
  static constexpr std::size_t kFewBytes = 4 << 10;

  // A connection whose socket has been full for kUnreadNs costs its user kUnreadBytes, until the
  // client reads. The kernel holds some 200 KiB of answers, and gRPC up to 1 MiB that it wants to
  // write, also of calls that have ended. An honest client that is stopped has little unread.
  static constexpr std::uint64_t kUnreadNs = 2'000'000'000;
  static constexpr std::uint64_t kUnreadBytes = (1 << 20) + (256 << 10);

  // The most bytes of headers whose end has not come, of the user's connections together. An honest
  // client sends a call's headers at once. The most of one connection: HeaderFrames::kMostBytes.
  static constexpr std::uint64_t kMostUnfinished = 256 << 10;

  // `account`: the user; its quota outlives this object. `most`: open calls that the user may have.
  UserConnections(const MemoryAccount& account, std::uint64_t most);

  // gRPC is about to get a connection. Called right before AddInsecureChannelFromFd(). `quota` is
  // held until gRPC has closed the descriptor. The connection's streams write `input`, which is not
  // null. RESOURCE_EXHAUSTED: the user is paused. UNAVAILABLE: after EndAll().
  absl::Status Expect(int descriptor, std::shared_ptr<void> quota,
                      std::shared_ptr<const ClientInput> input);
  // Looks at the connections, and ends some: see above. Returns false if there is nothing to watch
  // before the next Expect().
  bool Watch(const CountedServer& server, std::uint64_t now_ns);
  // Ends all connections, and refuses later ones: gRPC's server waits for their writes when it
  // stops.
  void EndAll();

 private:
  struct Connection {
    bool HasFewCalls() const;

    CountedConnection counted;
    BorrowedSocket socket;
    std::shared_ptr<void> quota;
    std::shared_ptr<const ClientInput> input;
    CallCounts before = {};       // at the look from which calls count: see kFewCalls
    CallCounts marked = {};       // at the look at marked_ns_: the next `before`
    CallCounts now = {};          // at the last look
    std::uint64_t closed_ns = 0;  // when the client's end was seen to be closed; 0: it is open
    std::uint64_t full_ns = 0;    // since when the socket is full; 0: it is not
    ArenaQuota::Reservation unread = {};
    bool ended = false;  // by this class, for doing harm
  };

  void TakeExpected() ABSL_EXCLUSIVE_LOCKS_REQUIRED(watch_mutex_);
  // Forgets what gRPC has closed, and ends what has been closing for too long.
  void Prune(std::uint64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(watch_mutex_);
  // Charges the user for connections that their clients do not read. Ends those for which the quota
  // has no room.
  void ChargeUnread(std::uint64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(watch_mutex_);
  // Ends connections whose headers are too long. True: some have ended, also by LimitHeaders().
  bool EndLongHeaders(std::uint64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(watch_mutex_);
  // Looks at the calls of each connection. True: there are too many.
  bool EndBusiest(const CallCounts& counted, std::uint64_t now_ns)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(watch_mutex_);

  const MemoryAccount account_;
  std::atomic<bool> pauses_{false};
  // Held by Watch() and EndAll(), which lock mutex_ while they hold it.
  Mutex watch_mutex_;
  std::vector<Connection> connections_ ABSL_GUARDED_BY(watch_mutex_);
  CallLimit limit_ ABSL_GUARDED_BY(watch_mutex_);
  std::size_t pruned_to_ ABSL_GUARDED_BY(watch_mutex_) = 0;  // connections, by the last Prune()
  std::uint64_t pruned_ns_ ABSL_GUARDED_BY(watch_mutex_) = 0;
  std::uint64_t looked_ns_ ABSL_GUARDED_BY(watch_mutex_) = 0;   // at the calls
  std::uint64_t headers_ns_ ABSL_GUARDED_BY(watch_mutex_) = 0;  // when EndLongHeaders() looked
  std::uint64_t marked_ns_ ABSL_GUARDED_BY(watch_mutex_) = 0;
  GrowingPause pause_ ABSL_GUARDED_BY(watch_mutex_);
  Mutex mutex_;
  std::vector<Connection> expected_ ABSL_GUARDED_BY(mutex_);  // since the last Watch()
  bool all_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_USER_CONNECTIONS_H_
