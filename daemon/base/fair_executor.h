// Runs the work of users by turns, so that no user waits until all work of another user is done.

#ifndef DAEMON_BASE_FAIR_EXECUTOR_H_
#define DAEMON_BASE_FAIR_EXECUTOR_H_

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"

namespace gradsync::daemon {

// Each user has a queue of its own. One piece of a user's work runs at a time. So with two threads,
// one user's long work holds one thread, and the other thread serves the other users. Users that
// wait take turns, one piece each.
//
// Its callers keep the queues and the pieces bounded. A session queues at most
// - for each layout: the work that creates its memory, the piece that maps the next part of it, the
//   pieces that unmap it, and the pieces that end one void step,
// - for each bucket: the pieces of one copy,
// - the pieces that write the done words that it has missed while it stayed, and the messages that
//   follow these words,
// - one teardown.
// A stream between nodes queues at most one message, and a job between nodes one piece of launches.
// Thread-safe. The destructor runs everything that is queued.
class FairExecutor final : public UserExecutor {
 public:
  // `rest`: after a piece, the user's next one waits this many times as long as the piece took. So
  // a user has at most 1/(rest+1) of a thread.
  explicit FairExecutor(int threads, int rest = 0);
  FairExecutor(const FairExecutor&) = delete;
  FairExecutor& operator=(const FairExecutor&) = delete;
  ~FairExecutor() override;

  void Run(const Tenant& user, std::function<void()> work) override;

 private:
  using Queue = std::deque<std::function<void()>>;
  using TimePoint = std::chrono::steady_clock::time_point;

  void Loop();
  // A user's work has ended, and its rest, if it has one.
  void GiveTurnLocked(const Tenant& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitForTurnLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int rest_;
  Mutex mutex_;
  CondVar changed_;
  // The users that have work or rest, each with the work that is not running yet.
  std::map<Tenant, Queue> users_ ABSL_GUARDED_BY(mutex_);
  // The users that have waiting work, no running work and no rest; the first one is next.
  std::deque<Tenant> turns_ ABSL_GUARDED_BY(mutex_);
  // The users that rest, by the end of the rest.
  std::multimap<TimePoint, Tenant> resting_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Last, so that the other members exist when they start.
  std::vector<std::thread> threads_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_FAIR_EXECUTOR_H_
