// The interface of a worker. A worker may be on this node, or on another node whose daemon forwards
// the calls.

#ifndef DAEMON_WORKER_WORKER_PORT_H_
#define DAEMON_WORKER_WORKER_PORT_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync::daemon {

// Thread-safe.
class WorkerPort {
 public:
  struct Reply {
    worker::Reply message;
    std::vector<UniqueFd> descriptors;
  };
  using Answered = std::function<void(absl::StatusOr<Reply>)>;

  virtual ~WorkerPort() = default;

  // Sends the call and sets its id. Never blocks. `answered` is called once, with the worker's
  // reply or error, or with the reason of its loss: on the thread that learns of it, or from within
  // Call. A worker of another node answers some calls from within Call although it is not lost.
  // `answered` must not block for long.
  virtual void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) = 0;

  // Ends the worker at once. Calls without a reply are answered when it has ended.
  virtual void Kill(const absl::Status& why) = 0;

  // Why the worker has ended or is being ended. OK while it runs.
  virtual absl::Status EndReason() const = 0;
  bool HasEnded() const { return !EndReason().ok(); }
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_WORKER_PORT_H_
