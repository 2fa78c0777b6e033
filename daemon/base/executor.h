// Executors run work on threads of their own, so that gRPC's threads stay free: they map, free and
// copy memory.

#ifndef DAEMON_BASE_EXECUTOR_H_
#define DAEMON_BASE_EXECUTOR_H_

#include <deque>
#include <functional>
#include <list>
#include <thread>

#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// Runs work later. Thread-safe. Tests use one that runs its work when they say so.
class Executor {
 public:
  virtual ~Executor() = default;
  // Never runs `work` within this call.
  virtual void Run(std::function<void()> work) = 0;
};

// One thread that runs work in the order of the calls. Its users bound its queue: each session
// queues at most one mapping per layout, one copy per bucket and one teardown. Thread-safe. The
// destructor runs everything that is queued.
class SerialExecutor final : public Executor {
 public:
  SerialExecutor();
  ~SerialExecutor() override;

  void Run(std::function<void()> work) override;

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last, so that the other members exist when it starts
};

// A thread for each piece of work, for work that may block for seconds and must not delay other
// work. It does not bound the number of threads. Thread-safe. The destructor waits for all threads.
class ConcurrentExecutor final : public Executor {
 public:
  ConcurrentExecutor() = default;
  ~ConcurrentExecutor() override;

  void Run(std::function<void()> work) override;

 private:
  using Threads = std::list<std::thread>;
  static void Join(Threads* threads);

  Mutex mutex_;
  CondVar changed_;
  Threads running_ ABSL_GUARDED_BY(mutex_);
  Threads finished_ ABSL_GUARDED_BY(mutex_);  // about to end; the next call joins them
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_EXECUTOR_H_
