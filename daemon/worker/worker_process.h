// A worker process of this node: starts, calls, watches and ends it.

#ifndef DAEMON_WORKER_WORKER_PROCESS_H_
#define DAEMON_WORKER_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_port.h"

namespace gradsync::daemon {

// The argument that makes main a worker, and the descriptor of the worker's socket.
inline constexpr char kWorkerArgument[] = "--worker";
inline constexpr int kWorkerSocket = 3;

struct WorkerProcessOptions {
  std::string program = "/proc/self/exe";
  std::string argument = kWorkerArgument;
  std::vector<std::string> environment;  // "NAME=VALUE"; overrides this process's own
  // Time for the reply to the first call, Start. Making a context takes seconds on a busy node.
  absl::Duration start_limit = absl::Seconds(60);
  // How often a worker that has calls to reply to is pinged.
  absl::Duration ping_interval = absl::Seconds(2);
  // A worker that has calls to reply to, and sends nothing for this long, is killed. Its longest
  // single operation takes about a second: to allocate and zero the whole memory of a GPU.
  absl::Duration hang_limit = absl::Seconds(20);
  // How long a worker may take to finish its launches after Stop, before it is killed.
  absl::Duration stop_limit = absl::Seconds(5);
  // False: no reply may carry a descriptor. Since Linux 6.16 the kernel refuses those that the
  // process sends. On older kernels a process that sends one is killed.
  bool takes_descriptors = true;
  // The most memory of the calls that wait until the process reads. With more, the process is
  // killed. A process that reads needs far less: by default a step has at most 4,096 calls, of some
  // 200 bytes.
  std::size_t queue_limit_bytes = std::size_t{64} << 20;
  // Makes the error of a process that is lost. `how` follows a subject: "was killed by signal 9".
  std::function<absl::Status(absl::string_view how)> lost;  // default: WORKER_LOST
  // Called on the object's thread with each event that the process sends without a call. May be
  // empty.
  std::function<void(const worker::EngineEvent&)> event;
};

// Thread-safe. Owns the process, and one thread that reads its replies and watches it.
class WorkerProcess final : public WorkerPort {
 public:
  // Fails if no process or thread can be made; RESOURCE_EXHAUSTED if a limit allows no more. If the
  // process ends without Stop, `ended` is called once, on this object's thread, after all calls
  // have been answered. It gets the status of Kill or of options.lost. Neither `ended` nor an
  // Answered may block for long or destroy this object.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(
      WorkerProcessOptions options, std::function<void(const absl::Status&)> ended);

  // Stops the process, which has stop_limit to finish its launches before it is killed. Calls
  // without a reply are answered CANCELLED.
  ~WorkerProcess() override;
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // As WorkerPort::Call. If the worker ends or has ended, `answered` gets the reason: the status of
  // Kill, CANCELLED after Stop, otherwise the status of options.lost.
  void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) override;

  // Ends the process at once; `ended` follows, with `why`.
  void Kill(const absl::Status& why) override;
  // Kills the process, then waits until `ended` has returned. Call it once, and not from a
  // callback.
  void End(const absl::Status& why);
  // Does what the destructor does, but the object still answers calls. Not from a callback.
  void Stop();
  // Begins what Stop does and does not wait, so that many processes can end at the same time. Stop
  // then waits for the rest. May come from a callback.
  void BeginStop();

  pid_t pid() const { return pid_; }
  // Sets the nice value of all its threads. The kernel may refuse to lower it (RLIMIT_NICE).
  void SetNice(int nice) const;
  absl::Status EndReason() const override;
  // The memory that the worker reported last; zeros before its first report.
  worker::Pong memory() const;

 private:
  struct Outgoing {
    worker::Call call;
    std::vector<UniqueFd> descriptors;
    std::size_t bytes = 0;  // its memory while it is in the queue
  };

  WorkerProcess(WorkerProcessOptions options, std::function<void(const absl::Status&)> ended,
                MessageSocket socket, pid_t pid, UniqueFd pidfd, UniqueFd wake);

  // The thread's main function.
  void Watch();
  // Reads one reply. False if the socket is closed.
  bool TakeReply();
  // Waits for the end of the process and returns how it ended, in words.
  std::string Reap();

  absl::Status Lost(absl::string_view how) const;
  void Wake() const;
  absl::Status SendLocked(Outgoing outgoing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED if the socket has no room.
  absl::Status Send(const Outgoing& outgoing) const;
  absl::Status EndReasonLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void KillLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pings the process when due, and kills it if it has been silent for too long.
  void WatchLocked(std::uint64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Milliseconds until WatchLocked has to be called; -1: never.
  int PatienceLocked(std::uint64_t now_ns) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t SilenceLimitLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t PingTimeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WorkerProcessOptions options_;
  const std::function<void(const absl::Status&)> ended_;
  const MessageSocket socket_;
  const pid_t pid_;
  const UniqueFd pidfd_;
  const UniqueFd wake_;  // an eventfd that wakes the thread

  mutable Mutex mutex_;
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Answered> unanswered_ ABSL_GUARDED_BY(mutex_);  // by the call's id
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);  // calls for which the socket had no room
  std::size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool starting_ ABSL_GUARDED_BY(mutex_) = true;  // no call has been answered yet
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status why_
      ABSL_GUARDED_BY(mutex_);  // the first failure: the process is ending, or has ended
  worker::Pong memory_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t owing_since_ns_ ABSL_GUARDED_BY(mutex_) =
      0;  // since when there are unanswered calls
  std::uint64_t heard_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t pinged_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t stop_until_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: Stop has not been asked for

  std::thread thread_;  // last: it uses the other members; constant after Start()
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_WORKER_PROCESS_H_
