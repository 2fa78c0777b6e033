#include "tools/bench/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace gradsync::bench {
namespace {

// After fork(): async-signal-safe calls alone. Reports errno through `report` if exec fails.
[[noreturn]] void RunInChild(char* const* arguments, const char* log_path, int report) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const int input = open("/dev/null", O_RDONLY);
  const int output = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (input >= 0 && output >= 0) {
    dup2(input, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    execv(arguments[0], arguments);
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(report, &error, sizeof(error));
  _exit(127);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const std::vector<std::string>& command,
                                                 const std::string& log_path) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  const pid_t pid = fork();
  if (pid == 0) RunInChild(arguments.data(), log_path.c_str(), report[1]);
  const int fork_error = errno;
  close(report[1]);
  if (pid < 0) {
    close(report[0]);
    return absl::ErrnoToStatus(fork_error, "fork");
  }
  ChildProcess child;
  child.pid_ = pid;
  child.log_path_ = log_path;
  child.pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  int error = 0;
  ssize_t bytes;
  do {
    bytes = read(report[0], &error, sizeof(error));  // end of file once exec has succeeded
  } while (bytes < 0 && errno == EINTR);
  close(report[0]);
  if (bytes == sizeof(error)) {
    return absl::UnavailableError(
        absl::StrCat("cannot run ", command[0], ": ", absl::ErrnoToStatus(error, "").message()));
  }
  return child;
}

ChildProcess::~ChildProcess() { Stop(absl::Seconds(5)); }

bool ChildProcess::Running() const { return pid_ > 0 && !AwaitEnd(absl::ZeroDuration()); }

bool ChildProcess::AwaitEnd(absl::Duration timeout) const {
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    pollfd end = {pidfd_, POLLIN, 0};
    const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
    const int ready = poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
    if (ready > 0) return true;
    if (ready == 0) return false;
  }
}

std::string ChildProcess::LastOutput() const {
  constexpr std::size_t kBytes = 2000;
  std::ifstream file(log_path_);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() > kBytes) text.erase(0, text.size() - kBytes);
  return text.empty() ? "(it wrote nothing)" : text;
}

void ChildProcess::Stop(absl::Duration grace) {
  if (pid_ <= 0) return;
  kill(pid_, SIGTERM);
  if (!AwaitEnd(grace)) kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  close(pidfd_);
  pid_ = -1;
  pidfd_ = -1;
}

}  // namespace gradsync::bench
