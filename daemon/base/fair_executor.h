// Runs the work of users by turns, so that no user waits until all work of another user is done.

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
  // The users that have work, each with the work that is not running yet.
  std::map<Tenant, Queue> users_ ABSL_GUARDED_BY(mutex_);
  // The users that have waiting work and no running work; the first one is next.
  std::deque<Tenant> turns_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Last, so that the other members exist when they start.
  std::vector<std::thread> threads_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_FAIR_EXECUTOR_H_
