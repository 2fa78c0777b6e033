#include "daemon/base/executor.h"

#include <utility>

namespace gradsync::daemon {

SerialExecutor::SerialExecutor() : thread_([this] { Loop(); }) {}

SerialExecutor::~SerialExecutor() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyOne();
  thread_.join();
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

ConcurrentExecutor::~ConcurrentExecutor() {
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
    const auto self = running_.emplace(running_.end());
    *self = std::thread([this, self, work = std::move(work)]() mutable {
      work();
      work = nullptr;
      MutexLock done(&mutex_);
      finished_.splice(finished_.end(), running_, self);
      changed_.NotifyAll();
    });
  }
  Join(&finished);
}

void ConcurrentExecutor::Join(Threads* threads) {
  for (std::thread& thread : *threads) thread.join();
}

}  // namespace gradsync::daemon
