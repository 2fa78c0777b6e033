// When a worker that has failed may be started again.

#ifndef DAEMON_WORKER_RESTART_POLICY_H_
#define DAEMON_WORKER_RESTART_POLICY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace gradsync {

// At once after a first failure, for the next generation of its trainers; then after 1, 2, 4, ...
// seconds, up to a minute: a GPU that fails every context must not keep the node busy making them.
// What has run for five minutes counts as sound again. A worker that refuses its GPU has not
// failed: the refusal stands for a second, which bounds how many processes are made to hear it. Not
// thread-safe.
class RestartPolicy {
 public:
  // OK, the refusal that stands, or UNAVAILABLE WORKER_RESTARTING with the last failure and when to
  // come again.
  absl::Status MayStart(std::uint64_t now_ns) const;

  void Started(std::uint64_t now_ns) { started_ns_ = now_ns; }
  // It has not started, or ended though nobody had asked it to.
  void Failed(std::uint64_t now_ns, const absl::Status& why);
  // It has started, and said why the GPU cannot be used, or not by this job.
  void Refused(std::uint64_t now_ns, const absl::Status& why);

  std::uint32_t failures() const { return failures_; }
  // Or refusal.
  const absl::Status& last_failure() const { return last_failure_; }

 private:
  std::uint64_t started_ns_ = 0;
  std::uint64_t next_start_ns_ = 0;
  std::uint32_t failures_ = 0;  // since it was last sound
  absl::Status last_failure_;
  bool refused_ = false;  // last_failure_ is a refusal
};

}  // namespace gradsync

#endif  // DAEMON_WORKER_RESTART_POLICY_H_
