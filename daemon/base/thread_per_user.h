// Runs work whose length a user decides, on a thread for that user alone.

#ifndef DAEMON_BASE_THREAD_PER_USER_H_
#define DAEMON_BASE_THREAD_PER_USER_H_

#include <chrono>
#include <deque>
#include <functional>
#include <map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// A user's thread starts with the user's first work, or with Keep(). It ends when it has had no
// work for a while, unless it is kept. So a user whose work never ends delays only that user's
// other work. FairExecutor has a fixed number of threads instead: it is for work that ends.
//
// Thread-safe. The destructor waits for all work.
class ThreadPerUser {
 public:
  explicit ThreadPerUser(std::chrono::milliseconds idle = std::chrono::seconds(1)) : idle_(idle) {}
  ThreadPerUser(const ThreadPerUser&) = delete;
  ThreadPerUser& operator=(const ThreadPerUser&) = delete;
  ~ThreadPerUser();

  // Runs `work` later, after the user's earlier work. RESOURCE_EXHAUSTED: the user has no thread
  // now, and the daemon cannot start one. Then `work` never runs.
  absl::Status Run(const Tenant& user, std::function<void()> work);
  // From now on the user has a thread, so that Run() does not fail. RESOURCE_EXHAUSTED: the daemon
  // cannot start one.
  absl::Status Keep(const Tenant& user);
  // After Keep(): the thread may end again. The destructor needs no Release().
  void Release(const Tenant& user);

 private:
  struct Queue {
    std::deque<std::function<void()>> work;
    CondVar changed;
    bool kept = false;
  };
  // The queue of the user, whose thread is started if there is none.
  absl::StatusOr<Queue*> QueueLocked(const Tenant& user) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Body of a user's thread.
  void Serve(const Tenant& user);

  const std::chrono::milliseconds idle_;
  Mutex mutex_;
  CondVar none_;  // no thread runs
  // The users that have a thread, each with the work that the thread has not begun.
  std::map<Tenant, Queue> users_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_THREAD_PER_USER_H_
