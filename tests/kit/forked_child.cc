#include "tests/kit/forked_child.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

namespace gradsync {
namespace {

pid_t Fork(const std::function<void()>& begin) {
  const pid_t pid = fork();
  if (pid < 0) std::abort();
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (begin) begin();
  for (;;) pause();
}

}  // namespace

ForkedChild::ForkedChild(const std::function<void()>& begin)
    : pid_(Fork(begin)), pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0))) {}

void ForkedChild::Kill() {
  if (!running_) return;
  running_ = false;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

}  // namespace gradsync
