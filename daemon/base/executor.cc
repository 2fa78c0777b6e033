#include "daemon/base/executor.h"

#include <utility>

#include "daemon/base/thread.h"

namespace gradsync::daemon {

SerialExecutor::SerialExecutor() : thread_([this] { Loop(); }) {}

absl::StatusOr<std::unique_ptr<SerialExecutor>> SerialExecutor::Start() {
  std::unique_ptr<SerialExecutor> executor(new SerialExecutor(NoThread{}));
  auto thread = StartThread([raw = executor.get()] { raw->Loop(); });
  if (!thread.ok()) return thread.status();
  executor->thread_ = *std::move(thread);
  return executor;
}

SerialExecutor::~SerialExecutor() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

void SerialExecutor::Run(std::function<void()> work) {
  {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.NotifyOne();
}

void SerialExecutor::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

ConcurrentExecutor::ConcurrentExecutor(std::size_t max_threads)
    : max_threads_(max_threads), thread_([this] { Stay(); }) {}

ConcurrentExecutor::~ConcurrentExecutor() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
  Threads finished;
  {
    MutexLock lock(&mutex_);
    while (!running_.empty()) changed_.Wait(&mutex_);
    finished.swap(finished_);
  }
  Join(&finished);
}

void ConcurrentExecutor::Run(std::function<void()> work) {
  Threads finished;
  {
    MutexLock lock(&mutex_);
    finished.swap(finished_);
    queue_.push_back(std::move(work));
    // The thread that waits takes one piece.
    if (queue_.size() > idle_ && running_.size() + 1 < max_threads_) StartLocked();
  }
  changed_.NotifyAll();
  Join(&finished);
}

void ConcurrentExecutor::StartLocked() {
  const auto self = running_.emplace(running_.end());
  auto thread = StartThread([this, self] { RunQueued(self); });
  if (thread.ok()) {
    *self = *std::move(thread);
  } else {
    running_.erase(self);  // another thread does the work later
  }
}

void ConcurrentExecutor::RunQueued(Threads::iterator self) {
  for (;;) {
    std::function<void()> work;
    {
      MutexLock lock(&mutex_);
      if (queue_.empty()) {
        finished_.splice(finished_.end(), running_, self);
        changed_.NotifyAll();
        return;
      }
      work = TakeLocked();
    }
    work();
  }
}

void ConcurrentExecutor::Stay() {
  for (;;) {
    std::function<void()> work;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_) {
        idle_ = 1;
        changed_.Wait(&mutex_);
        idle_ = 0;
      }
      if (queue_.empty()) return;
      work = TakeLocked();
    }
    work();
  }
}

std::function<void()> ConcurrentExecutor::TakeLocked() {
  std::function<void()> work = std::move(queue_.front());
  queue_.pop_front();
  return work;
}

void ConcurrentExecutor::Join(Threads* threads) {
  for (std::thread& thread : *threads) thread.join();
}

}  // namespace gradsync::daemon
