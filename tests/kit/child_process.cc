#include "tests/kit/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/kit/deadline.h"

extern char** environ;

namespace gradsync {
namespace {

// Appends `number` in decimal to `text`. Safe between fork and exec.
void AppendNumber(char* text, pid_t number) {
  char digits[16];
  int count = 0;
  for (; number > 0; number /= 10) digits[count++] = static_cast<char>('0' + number % 10);
  text += std::strlen(text);
  while (count > 0) *text++ = digits[--count];
  *text = '\0';
}

// Moves the descriptor above the numbers of standard streams and passed descriptors.
int MoveUp(int fd) { return fd < 0 ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 100); }

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

ChildProcess::ChildProcess(const ChildOptions& options) {
  std::vector<char*> argv, envp;
  for (const std::string& argument : options.arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "=") + 1);
    const auto replaces = [&](const std::string& given) { return given.rfind(name, 0) == 0; };
    if (name != "NOTIFY_SOCKET=" &&
        std::none_of(options.environment.begin(), options.environment.end(), replaces)) {
      envp.push_back(*entry);
    }
  }
  for (const std::string& entry : options.environment) {
    envp.push_back(const_cast<char*>(entry.c_str()));
  }
  char listen_pid[32] = "LISTEN_PID=";
  if (options.listen_pid) envp.push_back(listen_pid);
  envp.push_back(nullptr);
  const std::vector<int>& passed = options.passed;

  pid_ = fork();
  if (pid_ < 0) {
    std::perror("fork");
    std::abort();
  }
  if (pid_ == 0) {
    // Only calls that are safe after fork() in a multi-threaded process.
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    const int input =
        MoveUp(options.input >= 0 ? options.input : open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int output = MoveUp(options.output);
    const int error = MoveUp(options.error);
    int moved[8] = {};
    const std::size_t count = std::min<std::size_t>(passed.size(), 8);
    for (std::size_t i = 0; i < count; ++i) moved[i] = MoveUp(passed[i]);
    dup2(input, STDIN_FILENO);
    if (output >= 0) dup2(output, STDOUT_FILENO);
    if (error >= 0) dup2(error, STDERR_FILENO);
    for (std::size_t i = 0; i < count; ++i) dup2(moved[i], 3 + static_cast<int>(i));
    if (options.listen_pid) AppendNumber(listen_pid, getpid());
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  running_ = true;
  pidfd_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
}

ChildProcess::~ChildProcess() {
  if (running_) Kill();
}

void ChildProcess::Signal(int number) const {
  if (running_) kill(pid_, number);
}

std::optional<int> ChildProcess::Wait(int patience_ms) {
  if (!running_ || !AwaitReadable(pidfd_.get(), patience_ms)) return std::nullopt;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  running_ = false;
  return status;
}

std::uint64_t ChildProcess::Kill() {
  const std::uint64_t now_ns = NowNs();
  Signal(SIGKILL);
  Wait(-1);
  return now_ns;
}

std::optional<std::string> LineReader::Next(int patience_ms) {
  const std::uint64_t deadline_ns =
      NowNs() + static_cast<std::uint64_t>(patience_ms) * 1'000'000ull;
  for (;;) {
    if (const std::size_t end = buffered_.find('\n'); end != std::string::npos) {
      std::string line = buffered_.substr(0, end);
      buffered_.erase(0, end + 1);
      return line;
    }
    const int left_ms = MsUntil(deadline_ns);
    if (left_ms == 0 || !AwaitReadable(fd_.get(), left_ms)) return std::nullopt;
    char bytes[4096];
    const ssize_t size = read(fd_.get(), bytes, sizeof(bytes));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return std::nullopt;
    buffered_.append(bytes, static_cast<std::size_t>(size));
  }
}

bool AwaitReadable(int fd, int patience_ms) {
  return AwaitEither(fd, -1, patience_ms) == Ready::kFirst;
}

Ready AwaitEither(int first, int second, int patience_ms) {
  pollfd waited[] = {{first, POLLIN, 0}, {second, POLLIN, 0}};
  int ready = 0;
  while ((ready = poll(waited, 2, patience_ms)) < 0 && errno == EINTR) {
  }
  if (ready <= 0) return Ready::kNone;
  return waited[0].revents != 0 ? Ready::kFirst : Ready::kSecond;
}

}  // namespace gradsync
