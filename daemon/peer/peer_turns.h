// Which thread handles a message between nodes, and when.
//
// Two threads read the messages of all users. Such a thread handles a message at once if that takes
// microseconds, so that a message of a step need not wait for another thread. A message that may
// take longer waits for a turn of its user on the executor's threads. If a user has used up its
// share of the two threads, all its messages wait for turns. The time to parse them counts, too.
// Pings are always answered at once.
//
// Another node may name any user. So its address and its network have shares of their own, and one
// message of its address has a turn at a time, whatever users it names: see turn_queue.h.

#ifndef DAEMON_PEER_PEER_TURNS_H_
#define DAEMON_PEER_PEER_TURNS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/peer/turn_queue.h"

namespace gradsync::daemon {

enum class MessageWeight : unsigned char {
  kUrgent,  // a ping or its answer
  kLight,   // takes microseconds
  kHeavy,   // may take longer
};

// A share of the two threads. Thread-safe.
class ReadingShare {
 public:
  // True if there is no debt.
  bool HasPaid(std::uint64_t now_ns) const { return paid_ns_.load() <= now_ns; }
  // True if the debt is at most `ahead_ns`.
  bool Has(std::uint64_t now_ns, std::uint64_t ahead_ns) const {
    return paid_ns_.load() <= now_ns + ahead_ns;
  }
  // Adds a debt. It takes `price_ns` to pay, from `begin_ns` or from the end of the earlier debt
  // on.
  void Pay(std::uint64_t begin_ns, std::uint64_t price_ns);

 private:
  std::atomic<std::uint64_t> paid_ns_{0};
};

// The messages of the nodes of one address, whatever users they name. Thread-safe.
class AddressTurns {
 public:
  // For PeerTurns.
  AddressTurns(std::string address, std::shared_ptr<ReadingShare> network)
      : address_(std::move(address)), network_(std::move(network)) {}

  const std::string& address() const { return address_; }
  bool HasPaid(std::uint64_t now_ns) const { return share_.HasPaid(now_ns); }
  // True if neither the address nor its network has used up its share.
  bool HasShare(std::uint64_t now_ns) const;
  void Charge(std::uint64_t begin_ns, std::uint64_t use_ns);

 private:
  const std::string address_;
  ReadingShare share_;
  const std::shared_ptr<ReadingShare> network_;
};

class PeerTurns;

// The messages of one user, on all streams. Each stream brings its next message only when the last
// one is handled, so there are few at a time. Thread-safe.
class UserTurns {
 public:
  // As in MessageStream::InTurn().
  using Take = std::function<void(bool drop)>;

  // For PeerTurns.
  UserTurns(PeerTurns* turns, const Tenant& user) : turns_(turns), user_(user) {}

  bool HasPaid(std::uint64_t now_ns) const { return share_.HasPaid(now_ns); }
  // True if the user has not used up its share: a short message may be parsed and handled at once.
  bool HasShare(std::uint64_t now_ns) const;
  // Calls `take` once: within this call, or later on a thread of the executor. The message came at
  // `begin_ns`: the time since then counts as the user's. The caller holds a reference to this
  // object during the call, because `take` may drop the stream's reference. `address`: of the node
  // that names this user; null: the user is known.
  void Add(std::uint64_t begin_ns, MessageWeight weight, Take take,
           const std::shared_ptr<AddressTurns>& address = nullptr);

 private:
  void Charge(std::uint64_t begin_ns, AddressTurns* address);

  PeerTurns* const turns_;
  const Tenant user_;
  ReadingShare share_;
};

// Thread-safe. Outlives the streams and their tasks on the executor.
class PeerTurns {
 public:
  // In this many nanoseconds, a user's messages may use one nanosecond of the reading threads: half
  // of one thread.
  static constexpr std::uint64_t kTimePerUse = 2;
  // The same for the nodes of one address together: one thread.
  static constexpr std::uint64_t kTimePerUseOfAddress = 1;
  // In each two nanoseconds, the nodes of one network may use three nanoseconds of the reading
  // threads: one and a half threads.
  static constexpr std::uint64_t kUseOfNetworkInTwo = 3;
  // A user, an address or a network may use this much at once, ahead of its share.
  static constexpr std::uint64_t kBurstNs = 2'000'000;
  // The time that gRPC takes to read one message. It counts, too.
  static constexpr std::uint64_t kReadNs = 5'000;

  // Both outlive the streams.
  PeerTurns(const Clock* clock, UserExecutor* executor) : clock_(clock), executor_(executor) {}

  // Returns the turns of a user. All of the user's streams share them.
  std::shared_ptr<UserTurns> Of(const Tenant& user);
  // Returns the turns of the nodes of an address. `network`: see NetworkText().
  std::shared_ptr<AddressTurns> OfAddress(const std::string& address, const std::string& network);
  // From now on messages are dropped: the daemon stops, and their jobs have ended.
  void Stop() { stopped_.store(true); }

 private:
  friend class UserTurns;

  // The message waits for a turn.
  void Wait(const Tenant& user, const std::string& address, TurnQueue::Take take);
  // Has the message handled on the executor, and then those that have turns after it.
  void Run(TurnQueue::Turn turn);

  const Clock* const clock_;
  UserExecutor* const executor_;
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  // Users, addresses and networks whose streams have ended stay here until they have paid. So they
  // gain nothing if they connect again.
  std::map<Tenant, std::shared_ptr<UserTurns>> users_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<AddressTurns>> addresses_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<ReadingShare>> networks_ ABSL_GUARDED_BY(mutex_);

  Mutex queue_mutex_;
  TurnQueue queue_ ABSL_GUARDED_BY(queue_mutex_);
};

// Stands for callers who have not been welcomed yet: the user that they name may be somebody else.
inline constexpr Tenant kStrangers(static_cast<uid_t>(-1));
// Stands for such callers on this machine if the kernel does not name their user. Finding out who
// they are takes time (SocketTable), and the other strangers do not wait for it.
Tenant LocalStrangers();

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_TURNS_H_
