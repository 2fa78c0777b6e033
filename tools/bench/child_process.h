// A process that the bench has started.

#ifndef TOOLS_BENCH_CHILD_PROCESS_H_
#define TOOLS_BENCH_CHILD_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync::bench {

// Move-only. Its destructor stops the process; it also gets SIGTERM if the bench's main thread dies
// first.
class ChildProcess {
 public:
  // Starts `command` (an absolute path and arguments) in a process group of its own, so that a
  // terminal's Ctrl-C reaches the bench alone, with no input and with its output appended to
  // `log_path`. UNAVAILABLE if the program cannot be run.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& command,
                                            const std::string& log_path);

  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept { *this = std::move(other); }
  ChildProcess& operator=(ChildProcess&& other) noexcept {
    std::swap(pid_, other.pid_);
    std::swap(pidfd_, other.pidfd_);
    log_path_.swap(other.log_path_);
    return *this;
  }
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  bool Running() const;
  // SIGTERM, after `grace` SIGKILL; returns when the process is gone.
  void Stop(absl::Duration grace);
  // True if the process has ended by itself within `timeout`.
  bool AwaitEnd(absl::Duration timeout) const;
  // The end of what it has written, for messages.
  std::string LastOutput() const;

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  std::string log_path_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CHILD_PROCESS_H_
