// Describes a layout's running step in words: which ranks it waits for, and the errors that name
// it.

#ifndef DAEMON_JOB_STEP_REPORT_H_
#define DAEMON_JOB_STEP_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/late_ranks.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/membership.h"
#include "daemon/job/running_step.h"
#include "proto/gradsync/error_reason.h"

namespace gradsync::daemon {

// A view, made for one question. It refers to its arguments and owns nothing. Externally
// synchronized: guarded by the job's lock.
class StepReport {
 public:
  StepReport(const JobTerms& terms, const Membership& members, const LayoutAgreement& agreement,
             const RunningStep& step)
      : terms_(terms), members_(members), agreement_(agreement), step_(step) {}

  // ---- What the step waits for. Empty if the step has not begun.
  // "rank 1 has not marked bucket 3-7 ready".
  std::string Missing() const;
  // What each rank that is still in the step has not done.
  LateRanks Late() const;
  // The ranks that have not ended the step.
  std::vector<std::uint32_t> MissingRanks() const;

  // ---- Errors
  // `rank` has broken the protocol with a message about `step`, which may differ from the running
  // step.
  absl::Status Breach(absl::StatusCode code, Reason reason, std::uint32_t rank, std::uint64_t step,
                      std::optional<std::size_t> bucket, absl::string_view what) const;
  absl::Status MalformedMap(std::uint32_t rank, std::uint64_t step,
                            absl::string_view used_map) const;
  // FAILED_PRECONDITION POSITION_MISMATCH: `rank` is at another position than `other`.
  absl::Status PositionMismatch(std::uint32_t rank, Position position, std::uint32_t other) const;
  absl::Status VoidOnGpus() const;
  // `doubt`: why nobody knows whether some bucket is void on its GPUs.
  absl::Status InDoubt(const absl::Status& doubt) const;
  absl::Status TimedOut() const;
  // `rank` has released the layout, and has not ended the step.
  absl::Status Released(std::uint32_t rank) const;

 private:
  // By bucket: true if the rank has marked it, but the rank's GPU has not written its gradients
  // yet. Empty if the rank has no semaphores here.
  std::vector<bool> NotWritten(std::uint32_t rank) const;

  const JobTerms& terms_;
  const Membership& members_;
  const LayoutAgreement& agreement_;
  const RunningStep& step_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_STEP_REPORT_H_
