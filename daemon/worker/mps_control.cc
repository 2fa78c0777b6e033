#include "daemon/worker/mps_control.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/base/clock.h"
#include "daemon/base/unique_fd.h"

extern char** environ;

namespace gradsync::daemon {
namespace {

// Limit of an answer. Lists of processes are far shorter.
constexpr std::size_t kMaxMpsAnswerBytes = 64 << 10;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Starts the program with these descriptors as its input and output; it inherits no other one.
absl::StatusOr<pid_t> Spawn(const std::string& program, int input, int output) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  sigset_t ignored;
  sigemptyset(&ignored);
  sigaddset(&ignored, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &ignored);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::string name = program;
  char* const arguments[] = {name.data(), nullptr};
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, name.c_str(), &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT) return absl::NotFoundError(absl::StrCat("there is no ", program));
  if (error != 0) return absl::ErrnoToStatus(error, program);
  return pid;
}

// False if it is not ready before `until_ns`.
bool AwaitReadable(int fd, std::uint64_t until_ns) {
  const std::uint64_t now_ns = MonotonicNowNs();
  if (now_ns >= until_ns) return false;
  pollfd waited{fd, POLLIN, 0};
  return poll(&waited, 1, static_cast<int>((until_ns - now_ns) / 1'000'000 + 1)) > 0;
}

// Reads until the end of the stream.
absl::StatusOr<std::string> ReadAll(int fd, std::uint64_t until_ns) {
  std::string text;
  while (text.size() < kMaxMpsAnswerBytes) {
    if (!AwaitReadable(fd, until_ns))
      return absl::DeadlineExceededError("it does not answer in time");
    char piece[4096];
    const ssize_t size = read(fd, piece, sizeof(piece));
    if (size == 0) return text;
    if (size < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "read");
    if (size > 0) text.append(piece, static_cast<std::size_t>(size));
  }
  return absl::InternalError("its answer is too long");
}

// Runs the program with one command on its input and returns its output.
absl::StatusOr<std::string> Ask(const std::string& program, const std::string& command,
                                std::uint64_t until_ns) {
  auto input = MakePipe();
  auto output = MakePipe();
  if (!input.ok()) return input.status();
  if (!output.ok()) return output.status();
  // Fits a pipe, so this does not block.
  const std::string line = command + "\n";
  if (write(input->write.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return absl::ErrnoToStatus(errno, "write");
  }
  const auto pid = Spawn(program, input->read.get(), output->write.get());
  if (!pid.ok()) return pid.status();
  // No other process can have this pid: it is not reaped yet.
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, *pid, 0)));
  input->write.reset();
  output->write.reset();
  auto answer = ReadAll(output->read.get(), until_ns);
  if (!answer.ok() || !pidfd.valid() || !AwaitReadable(pidfd.get(), until_ns)) {
    kill(*pid, SIGKILL);
  }
  int status = 0;
  while (waitpid(*pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!answer.ok()) {
    return absl::Status(answer.status().code(),
                        absl::StrCat(program, ": ", command, ": ", answer.status().message()));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return absl::InternalError(absl::StrCat(program, ": ", command, " failed"));
  }
  return answer;
}

// The lines that are numbers. Skips all other lines.
std::vector<pid_t> PidsIn(const std::string& text) {
  std::vector<pid_t> pids;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    pid_t pid = 0;
    if (absl::SimpleAtoi(line, &pid) && pid > 0) pids.push_back(pid);
  }
  return pids;
}

}  // namespace

absl::Status TerminateMpsClient(const MpsControlOptions& options, pid_t client,
                                const std::function<bool()>& lives) {
  const std::uint64_t until_ns =
      MonotonicNowNs() + static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(options.limit));
  const auto servers = Ask(options.program, "get_server_list", until_ns);
  if (!servers.ok()) return servers.status();
  for (const pid_t server : PidsIn(*servers)) {
    const auto clients = Ask(options.program, absl::StrCat("get_client_list ", server), until_ns);
    if (!clients.ok()) return clients.status();
    const std::vector<pid_t> pids = PidsIn(*clients);
    if (std::find(pids.begin(), pids.end(), client) == pids.end()) continue;
    if (!lives()) return absl::NotFoundError("the process has ended by itself");
    return Ask(options.program, absl::StrCat("terminate_client ", server, " ", client), until_ns)
        .status();
  }
  return absl::NotFoundError(absl::StrCat("no MPS server has a client ", client));
}

}  // namespace gradsync::daemon
