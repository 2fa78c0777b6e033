// Executors run work on threads of their own, so that their callers need not wait for it. The work
// waits for the ends of processes and servers, destroys engines, or trims memory.

#ifndef DAEMON_BASE_EXECUTOR_H_
#define DAEMON_BASE_EXECUTOR_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// Runs work later. Thread-safe. Tests use one that runs its work when they say so.
class Executor {
 public:
  virtual ~Executor() = default;
  // Never runs `work` within this call.
  virtual void Run(std::function<void()> work) = 0;
};

// One thread that runs work in the order of the calls. Its callers keep its queue bounded.
// Thread-safe. The destructor runs everything that is queued.
class SerialExecutor final : public Executor {
 public:
  // For an executor that lives as long as the daemon: ends the program if no thread can be started.
  SerialExecutor();
  // For other executors. RESOURCE_EXHAUSTED: no thread could be started.
  static absl::StatusOr<std::unique_ptr<SerialExecutor>> Start();
  ~SerialExecutor() override;

  void Run(std::function<void()> work) override;

 private:
  struct NoThread {};
  explicit SerialExecutor(NoThread) {}
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last, so that the other members exist when it starts
};

// A thread for each piece of work, for work that may block for seconds and must not delay other
// work. One thread always exists: if no other thread can be started, or `max_threads` threads
// exist, work runs later. Its callers keep the queue bounded. Thread-safe. The destructor runs
// everything that is queued.
class ConcurrentExecutor final : public Executor {
 public:
  explicit ConcurrentExecutor(std::size_t max_threads);
  ~ConcurrentExecutor() override;

  void Run(std::function<void()> work) override;

 private:
  using Threads = std::list<std::thread>;
  static void Join(Threads* threads);
  // Starts a thread, if it can.
  void StartLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::function<void()> TakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The main functions of threads. RunQueued() is that of `self`, which ends when no work is
  // queued; Stay() is that of the thread that stays.
  void RunQueued(Threads::iterator self);
  void Stay();

  const std::size_t max_threads_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  std::size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that wait for work: 0 or 1
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Threads running_ ABSL_GUARDED_BY(mutex_);   // besides the one that stays
  Threads finished_ ABSL_GUARDED_BY(mutex_);  // about to end; the next call joins them
  std::thread thread_;  // last, so that the other members exist when it starts
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_EXECUTOR_H_
