// A worker as those that use it call it: one of this node, or of another one whose daemon carries
// the calls out.

#ifndef DAEMON_WORKER_WORKER_PORT_H_
#define DAEMON_WORKER_WORKER_PORT_H_

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/worker/worker.pb.h"

namespace gradsync {

// Thread-safe.
class WorkerPort {
 public:
  struct Reply {
    worker::Reply message;
    std::vector<UniqueFd> descriptors;
  };
  using Answered = std::function<void(absl::StatusOr<Reply>)>;

  virtual ~WorkerPort() = default;

  // Sends the call; its id is set here. `answered` is called once: on a thread of the worker's own,
  // with its reply or error, or with why it is lost; or at once, from within, if it is lost
  // already. It must not block for long; the call never does.
  virtual void Call(worker::Call call, std::vector<UniqueFd> descriptors, Answered answered) = 0;

  // Ends it at once. What it owes is answered when it has ended.
  virtual void Kill(const absl::Status& why) = 0;

  // It has ended, or is about to.
  virtual bool over() const = 0;
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_WORKER_PORT_H_
