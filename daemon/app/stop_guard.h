// Ends a process whose stop hangs, and says where it hangs.

#ifndef DAEMON_APP_STOP_GUARD_H_
#define DAEMON_APP_STOP_GUARD_H_

#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "absl/time/time.h"
#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// How long the daemon may take from the end of the drain to its own end. In this time it waits up
// to 3 s for clients to read the ends of their streams, up to 5 s for the streams that are left,
// and up to 5 s for those of other nodes. The files in deploy/ give it 5 s more before SIGKILL.
inline constexpr absl::Duration kStopLimit = absl::Seconds(15);
// The exit status of a process that StopGuard has ended.
inline constexpr int kExitHung = 3;

// Calls a function if a stop takes too long. A stop has stages, one after the other.
//
// Thread-safe. Owns its thread, which exists from the start: a daemon that stops may have used up
// its threads. The thread has the signal mask of the thread that makes this object.
class StopGuard {
 public:
  // `hung` gets the stage that has not ended. It is called at most once, on the guard's thread, and
  // may end the process.
  explicit StopGuard(std::function<void(const char* stage)> hung);
  // Ends the watch. Waits for a call of `hung` that is under way.
  ~StopGuard();
  StopGuard(const StopGuard&) = delete;
  StopGuard& operator=(const StopGuard&) = delete;

  // A stage begins, and the one before it has ended. `stage` is a constant.
  void Enter(const char* stage);
  // From now on all stages together may take `limit`. Replaces an earlier limit. Until the first
  // call there is no limit.
  void Allow(absl::Duration limit);

 private:
  void Watch();

  const std::function<void(const char* stage)> hung_;

  Mutex mutex_;
  CondVar changed_;
  const char* stage_ ABSL_GUARDED_BY(mutex_) = "";
  std::optional<std::chrono::steady_clock::time_point> deadline_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // the watch has ended
  std::thread thread_;  // last, so that the other members exist when it starts
};

// Logs the stage, and ends the process with kExitHung, without destructors. If it cannot log within
// a second, because nobody reads the log, SIGALRM ends the process. Workers and engine processes
// end, too, because their sockets to this process close.
[[noreturn]] void EndHungProcess(const char* stage);

}  // namespace gradsync::daemon

#endif  // DAEMON_APP_STOP_GUARD_H_
