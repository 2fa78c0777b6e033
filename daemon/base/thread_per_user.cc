#include "daemon/base/thread_per_user.h"

#include <thread>
#include <utility>

#include "daemon/base/thread.h"

namespace gradsync::daemon {

ThreadPerUser::~ThreadPerUser() {
  MutexLock lock(&mutex_);
  stopping_ = true;
  for (auto& user : users_) user.second.changed.NotifyOne();
  while (!users_.empty()) none_.Wait(&mutex_);
}

absl::Status ThreadPerUser::Run(const Tenant& user, std::function<void()> work) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<Queue*> queue = QueueLocked(user);
  if (!queue.ok()) return queue.status();
  (*queue)->work.push_back(std::move(work));
  (*queue)->changed.NotifyOne();
  return absl::OkStatus();
}

absl::Status ThreadPerUser::Keep(const Tenant& user) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<Queue*> queue = QueueLocked(user);
  if (!queue.ok()) return queue.status();
  (*queue)->kept = true;
  return absl::OkStatus();
}

void ThreadPerUser::Release(const Tenant& user) {
  MutexLock lock(&mutex_);
  const auto found = users_.find(user);
  if (found == users_.end()) return;
  found->second.kept = false;
  found->second.changed.NotifyOne();
}

absl::StatusOr<ThreadPerUser::Queue*> ThreadPerUser::QueueLocked(const Tenant& user) {
  const auto [found, is_new] = users_.try_emplace(user);
  if (is_new) {
    absl::StatusOr<std::thread> thread = StartThread([this, user] { Serve(user); });
    if (!thread.ok()) {
      users_.erase(found);
      return thread.status();
    }
    thread->detach();  // the destructor waits for its entry in users_
  }
  return &found->second;
}

void ThreadPerUser::Serve(const Tenant& user) {
  MutexLock lock(&mutex_);
  Queue& queue = users_[user];
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + idle_;
    bool idle = false;  // it has had no work for a while
    while (queue.work.empty() && !stopping_ && (queue.kept || !idle)) {
      if (idle) {
        queue.changed.Wait(&mutex_);
      } else {
        idle = !queue.changed.WaitUntil(&mutex_, until);
      }
    }
    if (queue.work.empty()) break;
    std::function<void()> work = std::move(queue.work.front());
    queue.work.pop_front();
    mutex_.Unlock();
    work();
    work = nullptr;  // may free much
    mutex_.Lock();
  }
  users_.erase(user);
  // Under the lock: after it the object may be gone.
  if (users_.empty()) none_.NotifyAll();
}

}  // namespace gradsync::daemon
