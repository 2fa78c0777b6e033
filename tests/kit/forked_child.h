// A copy of the test's own process that does nothing, for tests that look at processes.

#ifndef TESTS_KIT_FORKED_CHILD_H_
#define TESTS_KIT_FORKED_CHILD_H_

#include <sys/types.h>

#include <functional>

#include "tests/kit/child_process.h"

namespace gradsync {

// Sleeps until Kill(), the destructor, or the end of the thread that made it. Not thread-safe.
class ForkedChild {
 public:
  // The child calls `begin` first, which must not allocate memory: the test may have other threads.
  explicit ForkedChild(const std::function<void()>& begin = nullptr);
  ForkedChild(const ForkedChild&) = delete;
  ForkedChild& operator=(const ForkedChild&) = delete;
  ~ForkedChild() { Kill(); }

  // Ends it and waits for its end. Idempotent.
  void Kill();
  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }

 private:
  const pid_t pid_;
  const Descriptor pidfd_;
  bool running_ = true;
};

}  // namespace gradsync

#endif  // TESTS_KIT_FORKED_CHILD_H_
