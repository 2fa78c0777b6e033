#include "daemon/base/fair_executor.h"

#include <utility>

namespace gradsync::daemon {

FairExecutor::FairExecutor(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

FairExecutor::~FairExecutor() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void FairExecutor::Run(const Tenant& user, std::function<void()> work) {
  {
    MutexLock lock(&mutex_);
    const auto [queue, is_new] = users_.try_emplace(user);
    queue->second.push_back(std::move(work));
    // A user that is not new has a turn, or gets one when its work that runs has ended.
    if (!is_new) return;
    turns_.push_back(user);
  }
  changed_.NotifyOne();
}

void FairExecutor::Loop() {
  mutex_.Lock();
  for (;;) {
    while (turns_.empty() && !(stopping_ && users_.empty())) changed_.Wait(&mutex_);
    if (turns_.empty()) break;
    const Tenant user = turns_.front();
    turns_.pop_front();
    Queue& queue = users_[user];
    std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    mutex_.Unlock();
    work();
    work = nullptr;  // may free memory
    mutex_.Lock();
    if (!queue.empty()) {
      turns_.push_back(user);
      if (turns_.size() > 1) changed_.NotifyOne();  // this thread takes one of them
    } else {
      users_.erase(user);
      if (stopping_ && users_.empty()) changed_.NotifyAll();
    }
  }
  mutex_.Unlock();
}

}  // namespace gradsync::daemon
