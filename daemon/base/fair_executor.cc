#include "daemon/base/fair_executor.h"

#include <utility>

namespace gradsync::daemon {

FairExecutor::FairExecutor(int threads, int rest) : rest_(rest) {
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
    // A user that is not new has a turn, or gets one after its work that runs, or its rest.
    if (!is_new) return;
    turns_.push_back(user);
  }
  changed_.NotifyOne();
}

void FairExecutor::GiveTurnLocked(const Tenant& user) {
  const auto found = users_.find(user);
  if (!found->second.empty()) {
    turns_.push_back(user);
    if (turns_.size() > 1) changed_.NotifyOne();  // this thread takes one of them
    return;
  }
  users_.erase(found);
  if (stopping_ && users_.empty()) changed_.NotifyAll();
}

void FairExecutor::WaitForTurnLocked() {
  for (;;) {
    while (!resting_.empty() &&
           (stopping_ || resting_.begin()->first <= std::chrono::steady_clock::now())) {
      const Tenant user = resting_.begin()->second;
      resting_.erase(resting_.begin());
      GiveTurnLocked(user);
    }
    if (!turns_.empty() || (stopping_ && users_.empty())) return;
    if (resting_.empty()) {
      changed_.Wait(&mutex_);
    } else {
      changed_.WaitUntil(&mutex_, resting_.begin()->first);
    }
  }
}

void FairExecutor::Loop() {
  mutex_.Lock();
  for (;;) {
    WaitForTurnLocked();
    if (turns_.empty()) break;
    const Tenant user = turns_.front();
    turns_.pop_front();
    Queue& queue = users_[user];
    std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    if (!resting_.empty()) changed_.NotifyOne();  // another thread waits for the end of the rest
    mutex_.Unlock();
    const TimePoint begin = std::chrono::steady_clock::now();
    work();
    work = nullptr;  // may free memory
    const TimePoint end = std::chrono::steady_clock::now();
    mutex_.Lock();
    if (rest_ == 0) {
      GiveTurnLocked(user);
    } else {
      resting_.emplace(end + rest_ * (end - begin), user);
    }
  }
  mutex_.Unlock();
}

}  // namespace gradsync::daemon
