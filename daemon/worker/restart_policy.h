// Decides when a worker that has failed may start again.

#ifndef DAEMON_WORKER_RESTART_POLICY_H_
#define DAEMON_WORKER_RESTART_POLICY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace gradsync::daemon {

// After the first failure a worker may start at once, for the job's next generation. After further
// failures it may start after 1, 2, 4, ... seconds, up to a minute: a GPU on which every context
// fails must not keep the node busy. A worker that has run for five minutes counts as healthy
// again.
//
// A worker that refuses its GPU has not failed. For a second, further requests get the same refusal
// and no process is started. This bounds the number of processes. Not thread-safe.
class RestartPolicy {
 public:
  // OK if the worker may start. Otherwise the last refusal, for a second after it, or UNAVAILABLE
  // WORKER_RESTARTING with the last failure and the time until the next start.
  absl::Status MayStart(std::uint64_t now_ns) const;

  void Started(std::uint64_t now_ns) { started_ns_ = now_ns; }
  // The worker did not start, or ended without Stop.
  void Failed(std::uint64_t now_ns, const absl::Status& why);
  // The worker started, but the GPU cannot be used, at least not by this job.
  void Refused(std::uint64_t now_ns, const absl::Status& why);

  std::uint32_t failures() const { return failures_; }
  // The last failure or refusal.
  const absl::Status& last_failure() const { return last_failure_; }

 private:
  std::uint64_t started_ns_ = 0;
  std::uint64_t next_start_ns_ = 0;
  std::uint32_t failures_ = 0;  // since it was last healthy
  absl::Status last_failure_;
  bool refused_ = false;  // last_failure_ is a refusal
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_RESTART_POLICY_H_
