// Which thread handles a message between nodes, and when.
//
// Two threads read the messages of all users. Such a thread handles a message at once if that takes
// microseconds, so that no message of a step waits for another thread. What may take longer has a
// turn of its user on the executor's threads. So has every message of a user who has used these two
// threads much lately. What a user has used is measured, and what it takes to parse counts. Pings
// are always answered at once.

#ifndef DAEMON_PEER_PEER_TURNS_H_
#define DAEMON_PEER_PEER_TURNS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

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

// The messages of one user, on all streams. Each stream brings the next one when it has handled the
// last one, so they are few. Thread-safe.
class UserTurns {
 public:
  // As in MessageStream::InTurn().
  using Take = std::function<void(bool drop)>;

  // For PeerTurns.
  UserTurns(const PeerTurns* turns, const Tenant& user) : turns_(turns), user_(user) {}

  // The user may have a short message parsed and handled at once.
  bool HasShare(std::uint64_t now_ns) const;
  // Calls `take` once: within this call, or later on a thread of the executor. The message came at
  // `begin_ns`; what has been done with it since then counts. The caller holds a reference during
  // the call, because `take` may drop the stream's.
  void Add(std::uint64_t begin_ns, MessageWeight weight, Take take);

 private:
  void Charge(std::uint64_t begin_ns, std::uint64_t end_ns);

  const PeerTurns* const turns_;
  const Tenant user_;
  // When its share will have paid for what its messages have used.
  std::atomic<std::uint64_t> paid_ns_{0};
};

// Thread-safe. Outlives the streams, and what the executor has of them.
class PeerTurns {
 public:
  // What a user's messages may use of the threads that read: so many nanoseconds of time for each
  // one, half of one thread.
  static constexpr std::uint64_t kTimePerUse = 2;
  // And so much at once.
  static constexpr std::uint64_t kBurstNs = 2'000'000;
  // What gRPC takes to read a message counts, too.
  static constexpr std::uint64_t kReadNs = 5'000;

  // Both outlive the streams.
  PeerTurns(const Clock* clock, UserExecutor* executor) : clock_(clock), executor_(executor) {}

  // The turns of a user. Those who use them share them.
  std::shared_ptr<UserTurns> Of(const Tenant& user);
  // From now on messages are dropped: the daemon stops, and their jobs have ended.
  void Stop() { stopped_.store(true); }

 private:
  friend class UserTurns;

  const Clock* const clock_;
  UserExecutor* const executor_;
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  std::map<Tenant, std::weak_ptr<UserTurns>> users_ ABSL_GUARDED_BY(mutex_);
};

// Stands for callers who have not been welcomed: whatever user they name, it may be another's.
inline constexpr Tenant kStrangers(static_cast<uid_t>(-1));

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_TURNS_H_
