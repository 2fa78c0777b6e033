// Runs work off the gRPC threads: mapping and freeing of arenas, copies of Broadcast. Tests run it
// by hand.

#ifndef DAEMON_BASE_EXECUTOR_H_
#define DAEMON_BASE_EXECUTOR_H_

#include <deque>
#include <functional>
#include <list>
#include <thread>

#include "daemon/base/mutex.h"

namespace gradsync {

class Executor {
 public:
  virtual ~Executor() = default;
  // Runs `work` later, never from within this call. Thread-safe.
  virtual void Run(std::function<void()> work) = 0;
};

// One thread, first in first out. Its queue is bounded by what it serves: per session one mapping
// per layout, one copy and one teardown. Thread-safe. The destructor finishes what is queued.
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
  std::thread thread_;  // last: starts when the rest stands
};

// A thread for each piece of work, for what may block for seconds and must hold up nothing else. As
// many at a time as its caller has to run. Thread-safe. The destructor waits for all.
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
  Threads finished_ ABSL_GUARDED_BY(mutex_);  // about to end; joined by whoever comes next
};

}  // namespace gradsync

#endif  // DAEMON_BASE_EXECUTOR_H_
