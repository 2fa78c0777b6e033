// One worker, as the daemon sees it: a process that is started, called, watched and ended.

#ifndef DAEMON_WORKER_WORKER_PROCESS_H_
#define DAEMON_WORKER_WORKER_PROCESS_H_

#include <sys/types.h>

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
#include "absl/time/time.h"
#include "daemon/base/mutex.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/message_socket.h"
#include "daemon/worker/worker.pb.h"
#include "daemon/worker/worker_port.h"

namespace gradsync {

// The argument by which main knows that it is a worker, and the descriptor of its socket then.
inline constexpr char kWorkerArgument[] = "--worker";
inline constexpr int kWorkerSocket = 3;

struct WorkerProcessOptions {
  std::string program = "/proc/self/exe";
  std::vector<std::string> environment;  // "NAME=VALUE", before this process's own
  // For the reply to the first call, Start. Making a context takes seconds on a busy node.
  absl::Duration start_limit = absl::Seconds(60);
  // A worker with calls to reply to is asked for a sign of life this often ...
  absl::Duration ping_interval = absl::Seconds(2);
  // ... and is killed if none comes for so long. Allocating and zeroing a GPU's whole memory, the
  // longest thing it does at once, takes about a second.
  absl::Duration hang_limit = absl::Seconds(20);
  // For finishing what is launched, at Stop; killed then.
  absl::Duration stop_limit = absl::Seconds(5);
};

// Thread-safe. Owns the process and one thread, which reads its replies and watches it.
class WorkerProcess final : public WorkerPort {
 public:
  // `ended` is called once, on this object's thread, when the process has ended without Stop, with
  // why: UNAVAILABLE WORKER_LOST. All calls have been answered then. Neither it nor an Answered may
  // block for long, or destroy this object. Fails if no process can be made.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(
      WorkerProcessOptions options, std::function<void(const absl::Status&)> ended);

  // Stops the process: it may finish what is launched, for stop_limit, and is killed after that.
  // Calls without a reply are answered CANCELLED.
  ~WorkerProcess() override;
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Sends the call; its id is set here. `answered` is called once: on this object's thread, with
  // the worker's error, or WORKER_LOST if it ends or has ended; or at once, from within, if the
  // message cannot be sent. Never blocks.
  void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) override;

  // Ends it at once; `ended` follows, with `why`.
  void Kill(const absl::Status& why) override;
  // The same, and returns when `ended` has. Once, and not from a callback.
  void End(const absl::Status& why);

  pid_t pid() const { return pid_; }
  bool over() const override;
  // The memory it reported last; zeros before.
  worker::Pong memory() const;

 private:
  struct Outgoing {
    worker::Call call;
    std::vector<UniqueFd> descriptors;
  };

  WorkerProcess(WorkerProcessOptions options, std::function<void(const absl::Status&)> ended,
                MessageSocket socket, pid_t pid, UniqueFd pidfd, UniqueFd wake);

  // The thread.
  void Watch();
  // Reads one reply. False at the end.
  bool TakeReply();
  // How it ended, in words.
  std::string Reap();

  void Wake() const;
  absl::Status SendLocked(Outgoing outgoing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // RESOURCE_EXHAUSTED if its socket has no room.
  absl::Status Send(const Outgoing& outgoing) const;
  void KillLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pings, and kills what is silent for too long.
  void WatchLocked(std::uint64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Milliseconds until WatchLocked has something to do; -1: never.
  int PatienceLocked(std::uint64_t now_ns) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t SilenceLimitLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::uint64_t PingTimeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WorkerProcessOptions options_;
  const std::function<void(const absl::Status&)> ended_;
  const MessageSocket socket_;
  const pid_t pid_;
  const UniqueFd pidfd_;
  const UniqueFd wake_;  // an eventfd: something has changed for the thread

  mutable Mutex mutex_;
  std::uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Answered> unanswered_ ABSL_GUARDED_BY(mutex_);  // by the call's id
  std::deque<Outgoing> queue_ ABSL_GUARDED_BY(mutex_);  // what its socket has had no room for
  bool starting_ ABSL_GUARDED_BY(mutex_) = true;        // nothing has been answered yet
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);  // the first thing that went wrong
  worker::Pong memory_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t owing_since_ns_ ABSL_GUARDED_BY(mutex_) =
      0;  // since when there are unanswered calls
  std::uint64_t heard_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t pinged_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t stop_until_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: Stop has not been asked for

  std::thread thread_;  // last: starts when the rest stands
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_PROCESS_H_
