// Which thread handles a message between nodes, and when.
//
// Two threads read the messages of all users. Such a thread handles a message at once if that takes
// microseconds, so that a message of a step need not wait for another thread. A message that may
// take longer waits for a turn of its user on the executor's threads. If a user has used up its
// share of the two threads, all its messages wait for turns. The time to parse them counts, too.
// Pings are always answered at once. Another node may name any user, so its address has a share and
// a turn of its own, which the users that it names divide among themselves.

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

// The messages of the nodes of one address, whatever users they name. One of them has a turn at a
// time; their users take turns among themselves. Thread-safe.
class AddressTurns {
 public:
  using Take = std::function<void(bool drop)>;

  // For PeerTurns. `key` stands for the address on the executor.
  explicit AddressTurns(const Tenant& key) : key_(key) {}

  const Tenant& key() const { return key_; }
  bool HasPaid(std::uint64_t now_ns) const { return paid_ns_.load() <= now_ns; }
  // True if the address has not used up its share.
  bool HasShare(std::uint64_t now_ns) const;

 private:
  friend class UserTurns;

  // The message waits for a turn of its user.
  void Wait(const Tenant& user, Take take);
  // Of those that wait, the next one.
  Take Next();

  const Tenant key_;
  std::atomic<std::uint64_t> paid_ns_{0};  // as in UserTurns

  Mutex mutex_;
  std::map<Tenant, std::deque<Take>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::deque<Tenant> turns_ ABSL_GUARDED_BY(mutex_);  // the users that wait; the first is next
};

// The messages of one user, on all streams. Each stream brings its next message only when the last
// one is handled, so there are few at a time. Thread-safe.
class UserTurns {
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
  void Charge(std::uint64_t begin_ns, AddressTurns* address);

  const PeerTurns* const turns_;
  const Tenant user_;
  // The time at which the user's share will have paid for what its messages have used.
  std::atomic<std::uint64_t> paid_ns_{0};
};

// Thread-safe. Outlives the streams and their tasks on the executor.
class PeerTurns {
 public:
  // In this many nanoseconds, a user's messages may use one nanosecond of the reading threads: half
  // of one thread.
  static constexpr std::uint64_t kTimePerUse = 2;
  // The same for the nodes of one address together: one thread.
  static constexpr std::uint64_t kTimePerUseOfAddress = 1;
  // A user or an address may use this much at once, ahead of its share.
  static constexpr std::uint64_t kBurstNs = 2'000'000;
  // The time that gRPC takes to read one message. It counts, too.
  static constexpr std::uint64_t kReadNs = 5'000;

  // Both outlive the streams.
  PeerTurns(const Clock* clock, UserExecutor* executor) : clock_(clock), executor_(executor) {}

  // Returns the turns of a user. All of the user's streams share them.
  std::shared_ptr<UserTurns> Of(const Tenant& user);
  // Returns the turns of the nodes of an address.
  std::shared_ptr<AddressTurns> OfAddress(const std::string& address);
  // From now on messages are dropped: the daemon stops, and their jobs have ended.
  void Stop() { stopped_.store(true); }

 private:
  friend class UserTurns;

  const Clock* const clock_;
  UserExecutor* const executor_;
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  // A user whose streams have ended stays here until it has paid. So it gains nothing if it
  // connects again.
  std::map<Tenant, std::shared_ptr<UserTurns>> users_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<AddressTurns>> addresses_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t last_address_ ABSL_GUARDED_BY(mutex_) = 1;  // 1 is LocalStrangers()
};

// Stands for callers who have not been welcomed yet: the user that they name may be somebody else.
inline constexpr Tenant kStrangers(static_cast<uid_t>(-1));
// Stands for such callers on this machine if the kernel does not name their user. Finding out who
// they are takes time (SocketTable), and the other strangers do not wait for it.
Tenant LocalStrangers();

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_TURNS_H_
