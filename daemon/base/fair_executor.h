// Runs the work of users by turns, so that no user's work waits for all of another's.

#ifndef DAEMON_BASE_FAIR_EXECUTOR_H_
#define DAEMON_BASE_FAIR_EXECUTOR_H_

#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"

namespace gradsync::daemon {

// Each user has a queue of its own. One piece of a user's work runs at a time, so with two threads
// a user's long work holds one of them, and the other serves the other users. Users that wait take
// turns, one piece each.
//
// Its users bound the queues and the pieces: each session queues at most one mapping per layout,
// the pieces of one copy per bucket, those that end one void step per layout, and one teardown.
// Each stream between nodes queues one message, and each of their jobs one piece of launches.
// Thread-safe. The destructor runs everything that is queued.
class FairExecutor final : public UserExecutor {
 public:
  explicit FairExecutor(int threads);
  FairExecutor(const FairExecutor&) = delete;
  FairExecutor& operator=(const FairExecutor&) = delete;
  ~FairExecutor() override;

  void Run(const Tenant& user, std::function<void()> work) override;

 private:
  using Queue = std::deque<std::function<void()>>;
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  // The users that have work, with what is not running yet.
  std::map<Tenant, Queue> users_ ABSL_GUARDED_BY(mutex_);
  // Those of them whose work waits and none runs; the first one is next.
  std::deque<Tenant> turns_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Last, so that the other members exist when they start.
  std::vector<std::thread> threads_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_FAIR_EXECUTOR_H_
