#include "daemon/app/stop_guard.h"

#include <signal.h>
#include <unistd.h>

#include <utility>

#include "daemon/base/logging.h"

namespace gradsync::daemon {

StopGuard::StopGuard(std::function<void(const char* stage)> hung)
    : hung_(std::move(hung)), thread_([this] { Watch(); }) {}

StopGuard::~StopGuard() {
  {
    MutexLock lock(&mutex_);
    ended_ = true;
  }
  changed_.NotifyOne();
  thread_.join();
}

void StopGuard::Enter(const char* stage) {
  MutexLock lock(&mutex_);
  stage_ = stage;
}

void StopGuard::Allow(absl::Duration limit) {
  {
    MutexLock lock(&mutex_);
    deadline_ = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit);
  }
  changed_.NotifyOne();
}

void StopGuard::Watch() {
  const char* stage = nullptr;
  {
    MutexLock lock(&mutex_);
    while (!ended_) {
      if (!deadline_.has_value()) {
        changed_.Wait(&mutex_);
      } else if (std::chrono::steady_clock::now() < *deadline_) {
        changed_.WaitUntil(&mutex_, *deadline_);
      } else {
        stage = stage_;
        ended_ = true;
      }
    }
  }
  if (stage != nullptr) hung_(stage);
}

void EndHungProcess(const char* stage) {
  // The parent may have left SIGALRM ignored or blocked.
  signal(SIGALRM, SIG_DFL);
  sigset_t alarm_only;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarm_only, nullptr);
  alarm(1);
  Log(LogLevel::kError, "the stop hangs: the daemon ends at once", {{"stage", stage}});
  _exit(kExitHung);
}

}  // namespace gradsync::daemon
