// An executor that keeps its work until a test runs it.

#ifndef TESTS_JOB_MANUAL_EXECUTOR_H_
#define TESTS_JOB_MANUAL_EXECUTOR_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>

#include "daemon/base/user_executor.h"

namespace gradsync::daemon {

// Not thread-safe: for tests that run everything on their own thread.
class ManualExecutor final : public UserExecutor {
 public:
  void Run(const Tenant& /*user*/, std::function<void()> work) override {
    queue_.push_back(std::move(work));
  }

  std::size_t pending() const { return queue_.size(); }
  // Runs the oldest piece of work; there must be one.
  void RunNext() {
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    work();
  }
  // Runs all work, including work that it adds.
  void RunAll() {
    while (!queue_.empty()) RunNext();
  }

 private:
  std::deque<std::function<void()>> queue_;
};

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_MANUAL_EXECUTOR_H_
