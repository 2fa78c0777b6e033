#include "daemon/base/executor.h"

#include <utility>

namespace gradsync {

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

}  // namespace gradsync
