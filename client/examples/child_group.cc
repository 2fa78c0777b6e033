#include "client/examples/child_group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace gradsync::examples {
namespace {

// Both ends of a pipe, closed on exec; closes what is not taken.
struct Pipe {
  Pipe() = default;
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    if (read_end >= 0) close(read_end);
    if (write_end >= 0) close(write_end);
  }
  bool Open() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    read_end = ends[0];
    write_end = ends[1];
    return true;
  }
  int TakeRead() { return std::exchange(read_end, -1); }
  int TakeWrite() { return std::exchange(write_end, -1); }

  int read_end = -1;
  int write_end = -1;
};

// This process's environment with `changes` over it.
std::vector<std::string> Environment(const std::vector<std::string>& changes) {
  std::vector<std::string> environment = changes;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "=") + 1);
    const bool changed =
        std::any_of(changes.begin(), changes.end(),
                    [&name](const std::string& change) { return absl::StartsWith(change, name); });
    if (!changed) environment.emplace_back(*entry);
  }
  return environment;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// What the child does between fork and exec: only calls that are safe there.
struct ChildSide {
  char** arguments;
  char** environment;
  int input;
  int output;
  int error;
  int failure;  // errno of a failed exec goes there
  int signal_if_orphaned;
  pid_t parent;

  [[noreturn]] void Run() const {
    prctl(PR_SET_PDEATHSIG, signal_if_orphaned);
    if (getppid() != parent) _exit(127);  // it died before the line above
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(input, STDIN_FILENO) >= 0 && dup2(output, STDOUT_FILENO) >= 0 &&
        dup2(error, STDERR_FILENO) >= 0) {
      execve(arguments[0], arguments, environment);
    }
    const int reason = errno;
    [[maybe_unused]] const ssize_t told = write(failure, &reason, sizeof(reason));
    _exit(127);
  }
};

absl::Status SystemError(const char* call) {
  return absl::UnavailableError(absl::StrCat(call, ": ", std::strerror(errno)));
}

void CloseDescriptor(int* descriptor) {
  if (*descriptor >= 0) close(*descriptor);
  *descriptor = -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildGroup>> ChildGroup::Create() {
  sigset_t set;
  sigset_t former;
  sigemptyset(&set);
  for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, number);
  if (pthread_sigmask(SIG_BLOCK, &set, &former) != 0) return SystemError("pthread_sigmask");
  const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals < 0) {
    absl::Status status = SystemError("signalfd");
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
    return status;
  }
  // A reader of our output that goes away must not end us before the children are stopped.
  signal(SIGPIPE, SIG_IGN);
  return std::unique_ptr<ChildGroup>(new ChildGroup(signals, former));
}

ChildGroup::ChildGroup(int signals, const sigset_t& former_mask)
    : signals_(signals), former_mask_(former_mask) {}

ChildGroup::~ChildGroup() {
  Stop();
  close(signals_);
  signal(SIGPIPE, SIG_DFL);
  pthread_sigmask(SIG_SETMASK, &former_mask_, nullptr);
}

absl::StatusOr<ChildGroup::Id> ChildGroup::Start(const Command& command) {
  Pipe input;
  Pipe output;
  Pipe error;
  Pipe failure;
  if (!input.Open() || !output.Open() || !error.Open() || !failure.Open()) {
    return SystemError("pipe2");
  }
  const std::vector<std::string> environment = Environment(command.environment);
  std::vector<char*> argument_pointers = Pointers(command.arguments);
  std::vector<char*> environment_pointers = Pointers(environment);
  const ChildSide side = {argument_pointers.data(),
                          environment_pointers.data(),
                          input.read_end,
                          output.write_end,
                          error.write_end,
                          failure.write_end,
                          command.signal_if_orphaned,
                          getpid()};
  const pid_t pid = fork();
  if (pid < 0) return SystemError("fork");
  if (pid == 0) side.Run();

  close(failure.TakeWrite());
  int reason = 0;
  if (read(failure.read_end, &reason, sizeof(reason)) == sizeof(reason)) {
    waitpid(pid, nullptr, 0);
    return absl::UnavailableError(
        absl::StrCat("cannot run ", command.arguments[0], ": ", std::strerror(reason)));
  }
  Child child;
  child.pid = pid;
  child.running = true;
  child.input = input.TakeWrite();
  child.output.descriptor = output.TakeRead();
  child.error.descriptor = error.TakeRead();
  fcntl(child.output.descriptor, F_SETFL, O_NONBLOCK);
  fcntl(child.error.descriptor, F_SETFL, O_NONBLOCK);
  children_.push_back(std::move(child));
  return children_.size() - 1;
}

absl::StatusOr<ChildGroup::Event> ChildGroup::Next(absl::Time deadline) {
  while (events_.empty()) {
    std::vector<pollfd> polled = {{signals_, POLLIN, 0}};
    struct Source {
      Id child;
      EventKind kind;
    };
    std::vector<Source> sources;
    for (Id id = 0; id < children_.size(); ++id) {
      for (const auto& [stream, kind] : {std::pair(&children_[id].output, EventKind::kOutput),
                                         std::pair(&children_[id].error, EventKind::kError)}) {
        if (stream->descriptor < 0) continue;
        polled.push_back({stream->descriptor, POLLIN, 0});
        sources.push_back({id, kind});
      }
    }
    for (int descriptor : watched_) polled.push_back({descriptor, POLLIN, 0});

    int timeout_ms = -1;
    if (deadline != absl::InfiniteFuture()) {
      const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
      timeout_ms = static_cast<int>(absl::ToInt64Milliseconds(
          std::min(absl::Ceil(left, absl::Milliseconds(1)), absl::Hours(1))));
    }
    const int count = poll(polled.data(), polled.size(), timeout_ms);
    if (count < 0 && errno != EINTR) return SystemError("poll");
    if (count <= 0) {
      if (absl::Now() >= deadline) return Event{EventKind::kDeadline, 0, "", 0, 0};
      continue;
    }
    // Output first: what a child said comes before its end.
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (polled[i + 1].revents != 0) Read(sources[i].child, sources[i].kind);
    }
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      if (polled[1 + sources.size() + i].revents != 0) {
        events_.push_back({EventKind::kReadable, 0, "", 0, watched_[i]});
      }
    }
    if (polled[0].revents != 0) ReadSignals();
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void ChildGroup::Read(Id id, EventKind kind) {
  Child& child = children_[id];
  Stream& stream = kind == EventKind::kOutput ? child.output : child.error;
  std::array<char, 16 << 10> chunk;
  ssize_t count = 0;
  while (stream.descriptor >= 0 &&
         (count = read(stream.descriptor, chunk.data(), chunk.size())) > 0) {
    stream.unfinished.append(chunk.data(), static_cast<std::size_t>(count));
    std::size_t begin = 0;
    for (std::size_t end; (end = stream.unfinished.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      events_.push_back({kind, id, stream.unfinished.substr(begin, end - begin), 0, 0});
    }
    stream.unfinished.erase(0, begin);
  }
  if (count == 0) CloseDescriptor(&stream.descriptor);
}

void ChildGroup::ReadSignals() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo != SIGCHLD) {
      events_.push_back({EventKind::kSignal, 0, "", 0, static_cast<int>(info.ssi_signo)});
    }
  }
  Reap();
}

void ChildGroup::Reap() {
  for (Id id = 0; id < children_.size(); ++id) {
    Child& child = children_[id];
    int status = 0;
    if (!child.running || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
    child.running = false;
    for (EventKind kind : {EventKind::kOutput, EventKind::kError}) {
      Read(id, kind);
      Stream& stream = kind == EventKind::kOutput ? child.output : child.error;
      if (!stream.unfinished.empty()) {
        events_.push_back({kind, id, std::exchange(stream.unfinished, ""), 0, 0});
      }
      CloseDescriptor(&stream.descriptor);
    }
    CloseDescriptor(&child.input);
    events_.push_back({EventKind::kExit, id, "", status, 0});
  }
}

void ChildGroup::Watch(int descriptor) { watched_.push_back(descriptor); }

void ChildGroup::Unwatch(int descriptor) {
  watched_.erase(std::remove(watched_.begin(), watched_.end(), descriptor), watched_.end());
}

void ChildGroup::CloseInput(Id child) { CloseDescriptor(&children_[child].input); }

void ChildGroup::Kill(Id child, int signal) {
  if (children_[child].running) kill(children_[child].pid, signal);
}

void ChildGroup::Stop(absl::Duration grace) {
  watched_.clear();
  const auto any_running = [this] {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return child.running; });
  };
  for (Id id = 0; id < children_.size(); ++id) {
    CloseInput(id);
    Kill(id, SIGTERM);
  }
  const absl::Time deadline = absl::Now() + grace;
  while (any_running()) {
    events_.clear();
    absl::StatusOr<Event> event = Next(deadline);
    // A second Ctrl-C means: now.
    if (!event.ok() || event->kind == EventKind::kDeadline || event->kind == EventKind::kSignal) {
      break;
    }
  }
  for (Child& child : children_) {
    if (!child.running) continue;
    kill(-child.pid, SIGKILL);  // and what it may have started
    waitpid(child.pid, nullptr, 0);
    child.running = false;
    CloseDescriptor(&child.output.descriptor);
    CloseDescriptor(&child.error.descriptor);
  }
  events_.clear();
}

std::string DescribeExit(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(wait_status), " (",
                        strsignal(WTERMSIG(wait_status)), ")");
  }
  return absl::StrCat("exited with code ", WEXITSTATUS(wait_status));
}

}  // namespace gradsync::examples
