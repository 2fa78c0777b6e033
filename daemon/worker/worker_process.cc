#include "daemon/worker/worker_process.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/base/passed_descriptors.h"
#include "daemon/base/thread.h"
#include "daemon/worker/worker_error.h"
#include "proto/gradsync/duration_text.h"

extern char** environ;

namespace gradsync::daemon {
namespace {

// If a wait lasts so much longer than it should, the daemon itself was stopped. The process had no
// ping that it could have answered.
constexpr std::uint64_t kOwnStopNs = 1'000'000'000;

constexpr int kMillisecondsToEnd = 1000;

// A client of MPS has 2 hardware queues by default. A worker has more streams, and NCCL its own. If
// two share a queue, the zeroing of a new arena waits behind an all-reduce that spins, and the
// worker looks as if it hung.
constexpr char kHardwareQueues[] = "CUDA_DEVICE_MAX_CONNECTIONS=8";

std::uint64_t Ns(absl::Duration duration) {
  return static_cast<std::uint64_t>(absl::ToInt64Nanoseconds(duration));
}

// Starts the program with its standard streams and the socket. It inherits no other descriptor, and
// not the signal mask.
absl::StatusOr<pid_t> Spawn(const WorkerProcessOptions& options, int socket) {
  std::vector<char*> environment;
  for (const std::string& variable : options.environment) {
    environment.push_back(const_cast<char*>(variable.c_str()));
  }
  // The first one counts. A value that the daemon inherits was meant for trainers.
  environment.push_back(const_cast<char*>(kHardwareQueues));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  char name[] = "gradsyncd";
  std::string argument = options.argument;
  char* const arguments[] = {name, argument.data(), nullptr};

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, socket, kWorkerSocket);
  posix_spawn_file_actions_addclosefrom_np(&actions, kWorkerSocket + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  // A process group of its own: Ctrl-C goes to the daemon alone, which lets running steps finish.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, options.program.c_str(), &actions, &attributes, arguments,
                                environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error == EAGAIN) return OutOfThreads();
  if (error != 0) {
    return absl::ErrnoToStatus(error, absl::StrCat("starting ", options.program, " as a worker"));
  }
  return pid;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(
    WorkerProcessOptions options, std::function<void(const absl::Status&)> ended) {
  auto pair = MessageSocket::Pair();
  if (!pair.ok()) return pair.status();
  if (!options.takes_descriptors) pair->first.ExpectNoDescriptors();
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  const auto pid = Spawn(options, pair->second.fd());
  if (!pid.ok()) return pid.status();
  // No other process can have this pid: it is not reaped yet.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, *pid, 0)));
  if (!pidfd.valid()) {
    const int error = errno;
    kill(*pid, SIGKILL);
    waitpid(*pid, nullptr, 0);
    return absl::ErrnoToStatus(error, "pidfd_open");
  }
  std::unique_ptr<WorkerProcess> process(new WorkerProcess(std::move(options), std::move(ended),
                                                           std::move(pair->first), *pid,
                                                           std::move(pidfd), std::move(wake)));
  auto thread = StartThread([raw = process.get()] { raw->Watch(); });
  if (!thread.ok()) {
    process->Kill(thread.status());
    process->Reap();
    return thread.status();
  }
  process->thread_ = *std::move(thread);
  return process;
}

WorkerProcess::WorkerProcess(WorkerProcessOptions options,
                             std::function<void(const absl::Status&)> ended, MessageSocket socket,
                             pid_t pid, UniqueFd pidfd, UniqueFd wake)
    : options_(std::move(options)),
      ended_(std::move(ended)),
      socket_(std::move(socket)),
      pid_(pid),
      pidfd_(std::move(pidfd)),
      wake_(std::move(wake)) {}

WorkerProcess::~WorkerProcess() { Stop(); }

void WorkerProcess::Stop() {
  BeginStop();
  if (thread_.joinable()) thread_.join();
}

void WorkerProcess::BeginStop() {
  {
    const MutexLock lock(&mutex_);
    if (!has_ended_ && !stopping_) {
      stopping_ = true;
      Outgoing stop;
      stop.call.set_id(++last_id_);
      stop.call.mutable_stop();
      queue_.push_back(std::move(stop));
    }
  }
  Wake();
}

absl::Status WorkerProcess::Lost(absl::string_view how) const {
  if (options_.lost != nullptr) return options_.lost(how);
  return MakeError(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                   absl::StrCat("the GPU's worker process ", how,
                                "; see the daemon's log, then join again from every rank"));
}

absl::Status WorkerProcess::EndReason() const {
  const MutexLock lock(&mutex_);
  return EndReasonLocked();
}

absl::Status WorkerProcess::EndReasonLocked() const {
  if (why_.ok() && stopping_) return absl::CancelledError("the worker is stopping");
  return why_;
}

void WorkerProcess::End(const absl::Status& why) {
  Kill(why);
  thread_.join();
}

void WorkerProcess::Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) {
  absl::Status status;
  {
    const MutexLock lock(&mutex_);
    if (has_ended_ || stopping_) {
      status = EndReasonLocked();
    } else {
      const std::uint64_t id = ++last_id_;
      call.set_id(id);
      status = SendLocked({std::move(call), std::move(descriptors)});
      if (status.ok()) {
        if (unanswered_.empty()) {
          owing_since_ns_ = MonotonicNowNs();
          Wake();
        }
        unanswered_[id] = std::move(answered);
        return;
      }
    }
  }
  answered(status);
}

absl::Status WorkerProcess::SendLocked(Outgoing outgoing) {
  if (queue_.empty()) {
    const absl::Status status = Send(outgoing);
    if (!absl::IsResourceExhausted(status)) return status;
  }
  outgoing.bytes = outgoing.call.SpaceUsedLong();
  if (outgoing.bytes > options_.queue_limit_bytes - queued_bytes_) {
    KillLocked(Lost("did not read the daemon's calls and was killed"));
    return absl::OkStatus();  // its end answers the call
  }
  queued_bytes_ += outgoing.bytes;
  queue_.push_back(std::move(outgoing));
  Wake();
  return absl::OkStatus();
}

absl::Status WorkerProcess::Send(const Outgoing& outgoing) const {
  std::vector<int> descriptors;
  for (const UniqueFd& fd : outgoing.descriptors) descriptors.push_back(fd.get());
  const absl::Status status = socket_.Send(outgoing.call, descriptors, MessageSocket::Wait::kNo);
  // A closed socket means that the worker is ending; its end answers the call.
  return absl::IsUnavailable(status) ? absl::OkStatus() : status;
}

void WorkerProcess::Kill(const absl::Status& why) {
  const MutexLock lock(&mutex_);
  KillLocked(why);
}

void WorkerProcess::KillLocked(const absl::Status& why) {
  if (has_ended_) return;
  if (why_.ok()) why_ = why;
  syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0);
}

void WorkerProcess::SetNice(int nice) const {
  const MutexLock lock(&mutex_);
  if (has_ended_) return;
  // By group, in which it is alone: by process, the kernel would set its first thread only.
  if (setpriority(PRIO_PGRP, static_cast<id_t>(pid_), nice) == 0 || errno != EPERM) return;
  LogLimited(LogLevel::kWarning,
             "the kernel refuses priorities for engines, so a user with many jobs slows others "
             "down: let the daemon call setpriority, as in deploy/systemd/gradsyncd.service");
}

worker::Pong WorkerProcess::memory() const {
  const MutexLock lock(&mutex_);
  return memory_;
}

void WorkerProcess::Wake() const {
  const std::uint64_t one = 1;
  // The write fails only if the thread is being woken already.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void WorkerProcess::Watch() {
  for (bool open = true;;) {
    pollfd waited[] = {{pidfd_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}, {-1, POLLIN, 0}};
    const std::uint64_t now = MonotonicNowNs();
    int patience_ms = -1;
    {
      const MutexLock lock(&mutex_);
      if (open) waited[2].fd = socket_.fd();
      if (!queue_.empty()) waited[2].events |= POLLOUT;
      patience_ms = PatienceLocked(now);
    }
    poll(waited, std::size(waited), patience_ms);
    const bool was_stopped =
        patience_ms >= 0 &&
        MonotonicNowNs() > now + std::uint64_t{1'000'000} * patience_ms + kOwnStopNs;
    if (waited[1].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
    // A child of the ended process may hold the socket. From now on it cannot send, so the thread
    // comes to the end of the replies. Those that are queued stay readable.
    if (waited[0].revents != 0) shutdown(socket_.fd(), SHUT_RD);
    if ((waited[2].revents & ~POLLOUT) != 0) {
      open = TakeReply();
      // A process closes its descriptors a moment before its pidfd shows the end.
      if (!open && poll(waited, 1, kMillisecondsToEnd) == 0) Kill(Lost("closed its socket"));
    } else if (waited[0].revents != 0) {
      break;  // it has ended, and all its replies are read
    }
    const MutexLock lock(&mutex_);
    while (!queue_.empty() && !absl::IsResourceExhausted(Send(queue_.front()))) {
      queued_bytes_ -= queue_.front().bytes;
      queue_.pop_front();
    }
    if (was_stopped) heard_ns_ = MonotonicNowNs();
    WatchLocked(MonotonicNowNs());
  }
  // Reaping must not wait while it holds the lock, not even for a debugger.
  siginfo_t info;
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
  }
  absl::Status why;
  std::map<std::uint64_t, Answered> unanswered;
  bool stopped;
  {
    const MutexLock lock(&mutex_);
    const std::string how = Reap();  // from now on its pid may be another's
    has_ended_ = true;
    stopped = stopping_;
    if (why_.ok()) {
      why_ = stopped ? absl::CancelledError("the worker has been stopped") : Lost(how);
    }
    why = why_;
    unanswered.swap(unanswered_);
  }
  for (auto& [id, answered] : unanswered) answered(why);
  if (!stopped) ended_(why);
}

int WorkerProcess::PatienceLocked(std::uint64_t now_ns) const {
  if (!why_.ok()) return -1;  // it was killed, which may take its driver long
  std::uint64_t until_ns = UINT64_MAX;
  if (stop_until_ns_ != 0) until_ns = stop_until_ns_;
  if (!unanswered_.empty()) {
    until_ns = std::min(until_ns, SilenceLimitLocked());
    if (!starting_) until_ns = std::min(until_ns, PingTimeLocked());
  }
  if (until_ns == UINT64_MAX) return -1;
  // Rounded up, so that the thread does not wake too early several times.
  return until_ns <= now_ns ? 0 : static_cast<int>((until_ns - now_ns) / 1'000'000 + 1);
}

std::uint64_t WorkerProcess::SilenceLimitLocked() const {
  return std::max(heard_ns_, owing_since_ns_) +
         Ns(starting_ ? options_.start_limit : options_.hang_limit);
}

std::uint64_t WorkerProcess::PingTimeLocked() const {
  return std::max(pinged_ns_, owing_since_ns_) + Ns(options_.ping_interval);
}

void WorkerProcess::WatchLocked(std::uint64_t now_ns) {
  if (!why_.ok()) return;  // it was killed
  if (stopping_) {
    if (stop_until_ns_ == 0) stop_until_ns_ = now_ns + Ns(options_.stop_limit);
    if (now_ns >= stop_until_ns_) KillLocked(absl::DeadlineExceededError("it did not stop"));
  }
  if (unanswered_.empty()) return;
  if (now_ns >= SilenceLimitLocked()) {
    KillLocked(
        Lost(absl::StrCat("gave no sign of life for ",
                          DurationText(starting_ ? options_.start_limit : options_.hang_limit),
                          starting_ ? " while it started" : "", " and was killed")));
  } else if (!starting_ && now_ns >= PingTimeLocked()) {
    pinged_ns_ = now_ns;
    Outgoing ping;
    ping.call.set_id(++last_id_);
    ping.call.mutable_ping();
    // A ping that cannot be sent counts as unanswered.
    if (queue_.empty()) Send(ping).IgnoreError();
  }
}

bool WorkerProcess::TakeReply() {
  auto received = socket_.Receive();
  if (!received.ok() || received->end) return false;
  Reply reply;
  const bool parsed = reply.message.ParseFromString(received->bytes);
  // Only the memory of an arena is passed.
  const bool passes = options_.takes_descriptors && parsed && !reply.message.has_error() &&
                      reply.message.has_arena_added();
  const std::size_t expected = passes ? 1 : 0;
  if (received->descriptors.size() > expected) {
    CloseAtOnce(std::move(received->descriptors));
    Kill(Lost("sent more descriptors than its reply needs, and was killed"));
    return false;
  }
  if (!parsed) return false;
  reply.descriptors = std::move(received->descriptors);
  if (reply.message.has_engine_event()) {
    {
      const MutexLock lock(&mutex_);
      heard_ns_ = MonotonicNowNs();
    }
    if (options_.event != nullptr) options_.event(reply.message.engine_event());
    return true;
  }
  const absl::Status error =
      reply.message.has_error() ? DecodeError(reply.message.error()) : absl::OkStatus();
  Answered answered;
  {
    const MutexLock lock(&mutex_);
    heard_ns_ = MonotonicNowNs();
    if (reply.message.has_pong()) memory_ = reply.message.pong();
    // A process that says this exits. If it stays, its calls must not wait for it.
    if (reply.message.call() == 0) {
      KillLocked(Lost(absl::StrCat("has failed: ", error.message())));
    }
    const auto call = unanswered_.find(reply.message.call());
    if (call == unanswered_.end()) return true;  // a Pong, a failure, or the reply to Stop
    starting_ = false;
    answered = std::move(call->second);
    unanswered_.erase(call);
  }
  if (error.ok()) {
    answered(std::move(reply));
  } else {
    answered(error);
  }
  return true;
}

std::string WorkerProcess::Reap() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(status), " (",
                        strsignal(WTERMSIG(status)), ")");
  }
  return absl::StrCat("has exited with status ", WEXITSTATUS(status));
}

}  // namespace gradsync::daemon
