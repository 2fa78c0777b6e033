// Turns for threads that work on gradients beside the reduce threads: the lanes of the engines
// between nodes. In a turn a lane adds up the local ranks, or writes a result back to them. A user
// with many engines has many lanes. The kernel shares the CPUs by thread, so without turns such a
// user would get more than others.

#ifndef DAEMON_REDUCE_TURN_GATE_H_
#define DAEMON_REDUCE_TURN_GATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/reduce/user_shares.h"

namespace gradsync::daemon {

// Few threads have a turn at a time. If more threads want one, the next turn goes to the user that
// has had the fewest bytes (UserShares). Among that user's threads, it goes to the one that has
// waited longest. A thread that finds a turn free only takes the lock: it makes no system call.
//
// A thread that has a turn must not wait for another thread, so every wait for a turn ends.
// Thread-safe. Outlives its clients.
class TurnGate {
 public:
  // Threads of one user that stop waiting together, such as the lanes of one engine. Thread-safe;
  // must outlive its turns.
  class Client {
   public:
    // Null `gate`: every turn begins at once.
    Client(TurnGate* gate, const Tenant& user) : gate_(gate), user_(user) {}
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    // Ends the waits of its threads: they get no turn, neither now nor later. Turns that have begun
    // go on.
    void Close();

   private:
    friend class TurnGate;
    TurnGate* const gate_;
    const Tenant user_;
    bool closed_ = false;  // guarded by the gate's mutex
  };

  // Waits for a turn of `client`, in which the thread reads and writes `bytes` bytes. The
  // destructor ends the turn.
  class Turn {
   public:
    Turn(Client* client, std::uint64_t bytes);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    // False: the client is closed, and this is no turn.
    bool given() const { return given_; }

   private:
    TurnGate* const gate_;
    const std::uint64_t bytes_;
    UserShares::User* user_ = nullptr;
    std::uint64_t start_ns_ = 0;
    bool given_;
  };

  // `at_once`: how many turns there are at a time; less than 1 counts as 1. `clock` measures turns;
  // null: MonotonicNowNs().
  explicit TurnGate(int at_once, const Clock* clock = nullptr);
  TurnGate(const TurnGate&) = delete;
  TurnGate& operator=(const TurnGate&) = delete;

  // Threads that wait for a turn.
  std::size_t waiting() const;

 private:
  // A thread that waits. It lives on that thread's stack.
  struct Waiter {
    const Client* client = nullptr;
    UserShares::User* user = nullptr;
    std::uint64_t bytes = 0;
    bool given = false;
    CondVar changed;
  };

  // Null: the client is closed.
  UserShares::User* Begin(Client* client, std::uint64_t bytes);
  void End(UserShares::User* user, std::uint64_t bytes, std::uint64_t ns);
  // Requires that a turn is free. Gives it to the waiter that is next, if there is one.
  void GiveLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginLocked(UserShares::User* user, std::uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t NowNs() const { return clock_ == nullptr ? MonotonicNowNs() : clock_->NowNs(); }

  const std::size_t at_once_;
  const Clock* const clock_;

  mutable Mutex mutex_;
  UserShares users_ ABSL_GUARDED_BY(mutex_);
  std::size_t running_ ABSL_GUARDED_BY(mutex_) = 0;  // turns
  // Longest first. Empty unless running_ == at_once_.
  std::vector<Waiter*> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_TURN_GATE_H_
