// Which thread handles a message between nodes, and when.
//
// Two threads read the messages of all users. Such a thread handles a message at once if that takes
// microseconds, so that a message of a step need not wait for another thread. A message that may
// take longer waits for a turn of its user on the executor's threads. If a user has used up its
// share of the two threads, all its messages wait for turns. The time to parse them counts, too.
// Pings are always answered at once.
//
// Another node may name any user. So its network has a share of its own, and one message of its
// address has a turn at a time, whatever users it names.

#ifndef DAEMON_PEER_PEER_TURNS_H_
#define DAEMON_PEER_PEER_TURNS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"

namespace gradsync::daemon {

enum class MessageWeight : unsigned char {
  kUrgent,  // a ping or its answer
  kLight,   // takes microseconds
  kHeavy,   // may take longer
};

class PeerTurns;
class UserTurns;

// What the messages of the nodes of one network have used. An IPv4 address is its own network.
// Thread-safe.
class NetworkShare {
 public:
  bool HasPaid(std::uint64_t now_ns) const { return paid_ns_.load() <= now_ns; }

 private:
  friend class AddressTurns;
  friend class UserTurns;

  std::atomic<std::uint64_t> paid_ns_{0};  // as in UserTurns
};

// The messages of the nodes of one address that wait for turns. One of them has a turn at a time.
// Thread-safe.
class AddressTurns {
 public:
  // For PeerTurns.
  explicit AddressTurns(std::shared_ptr<NetworkShare> share) : share_(std::move(share)) {}

  // True if the network has not used up its share.
  bool HasShare(std::uint64_t now_ns) const;
  // For PeerTurns, which asks the network.
  static bool HasPaid(std::uint64_t /*now_ns*/) { return true; }

 private:
  friend class UserTurns;

  // Begins a message of the user. False: another message of the address runs. When that one has
  // ended, End() returns the user.
  bool Begin(const std::shared_ptr<UserTurns>& user);
  // The message that runs has ended. Returns the user that has waited longest; null: none waits.
  std::shared_ptr<UserTurns> End();

  const std::shared_ptr<NetworkShare> share_;

  Mutex mutex_;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // one runs
  std::deque<std::shared_ptr<UserTurns>> waiting_ ABSL_GUARDED_BY(mutex_);
};

// The messages of one user, on all streams. Each stream brings its next message only when the last
// one is handled, so there are few at a time. Thread-safe. Lock order: UserTurns, AddressTurns.
class UserTurns : public std::enable_shared_from_this<UserTurns> {
 public:
  // As in MessageStream::InTurn().
  using Take = std::function<void(bool drop)>;

  // For PeerTurns.
  UserTurns(const PeerTurns* turns, const Tenant& user) : turns_(turns), user_(user) {}

  // True if the user's share has paid for all that its messages have used.
  bool HasPaid(std::uint64_t now_ns) const { return paid_ns_.load() <= now_ns; }
  // True if the user has not used up its share: a short message may be parsed and handled at once.
  bool HasShare(std::uint64_t now_ns) const;
  // Calls `take` once: within this call, or later on a thread of the executor. The message came at
  // `begin_ns`: the time since then counts as the user's. The caller holds a reference to this
  // object during the call, because `take` may drop the stream's reference. `address`: of the node
  // that names this user; null: the user is known.
  void Add(std::uint64_t begin_ns, MessageWeight weight, Take take,
           const std::shared_ptr<AddressTurns>& address = nullptr);

 private:
  // The messages of an address that wait.
  struct Waiting {
    std::shared_ptr<AddressTurns> address;
    std::deque<Take> takes;  // not empty
    bool parked = false;     // AddressTurns::End() returns this user
  };

  void Charge(std::uint64_t begin_ns, AddressTurns* address);
  void Wait(const std::shared_ptr<AddressTurns>& address, Take take);
  // Has RunNext() called on the executor.
  void Schedule();
  // Runs one message, of the address that has waited longest, if one can run.
  void RunNext();
  // A message of the address can run.
  void Resume(const AddressTurns* address);

  const PeerTurns* const turns_;
  const Tenant user_;
  // The time at which the user's share will have paid for what its messages have used.
  std::atomic<std::uint64_t> paid_ns_{0};

  Mutex mutex_;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // the first is next
  bool scheduled_ ABSL_GUARDED_BY(mutex_) = false;       // RunNext() is to be called, or runs
};

// Thread-safe. Outlives the streams and their tasks on the executor.
class PeerTurns {
 public:
  // In this many nanoseconds, a user's messages may use one nanosecond of the reading threads: half
  // of one thread.
  static constexpr std::uint64_t kTimePerUse = 2;
  // The same for the nodes of one network together: one thread.
  static constexpr std::uint64_t kTimePerUseOfNetwork = 1;
  // A user or a network may use this much at once, ahead of its share.
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

  const Clock* const clock_;
  UserExecutor* const executor_;
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  // A user or a network whose streams have ended stays here until it has paid. So it gains nothing
  // if it connects again.
  std::map<Tenant, std::shared_ptr<UserTurns>> users_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<AddressTurns>> addresses_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<NetworkShare>> networks_ ABSL_GUARDED_BY(mutex_);
};

// Stands for callers who have not been welcomed yet: the user that they name may be somebody else.
inline constexpr Tenant kStrangers(static_cast<uid_t>(-1));
// Stands for such callers on this machine if the kernel does not name their user. Finding out who
// they are takes time (SocketTable), and the other strangers do not wait for it.
Tenant LocalStrangers();

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_TURNS_H_
