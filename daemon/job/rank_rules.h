// What a rank may ask of its job in its present state.

#ifndef DAEMON_JOB_RANK_RULES_H_
#define DAEMON_JOB_RANK_RULES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/job/collective_order.h"
#include "daemon/job/job_options.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_set.h"
#include "daemon/job/membership.h"
#include "daemon/job/operation_channel.h"

namespace gradsync::daemon {

// Reads the parts of a job, and changes none.
//
// Externally synchronized: guarded by the job's lock.
class RankRules {
 public:
  // All of them outlive this object.
  RankRules(const JobTerms& terms, const Membership& members, const LayoutSet& layouts,
            const OperationChannel& operations, const CollectiveOrder& collectives)
      : terms_(terms),
        members_(members),
        layouts_(layouts),
        operations_(operations),
        collectives_(collectives) {}

  // OK if a session may join as this rank. Otherwise as Job::Join. `active`: the job has not ended.
  absl::Status CheckJoin(std::uint32_t rank, std::uint32_t world_size, const JobOptions& options,
                         bool active) const;

  // ---- What the rank says. These return OK, or how the rank breaks the protocol:
  // FAILED_PRECONDITION PROTOCOL_VIOLATION, which ends its session.

  // The rank may take part in the operation.
  absl::Status CheckTakesPart(std::uint32_t rank, std::uint64_t sequence) const;
  // The rank may join the operation. INVALID_ARGUMENT UNKNOWN_RANK: the job has no such root.
  absl::Status CheckOperation(std::uint32_t rank, std::uint64_t sequence,
                              const OperationSpec& spec) const;
  // The rank may send a message about the state of the model: in this job, survivors bring the
  // state to replacements.
  absl::Status CheckHeals(std::uint32_t rank, absl::string_view message) const;
  // The rank may leave: it has not left yet, and is in no step and no operation. A rank that stays
  // may still leave for good (`exit`). A loading rank may not leave. A healing rank may not stay.
  // It may leave for good, unless a running step has gradients of its lost session.
  absl::Status CheckLeave(std::uint32_t rank, bool exit) const;
  // The rank may finish. The conditions are those for leaving for good. A rank that stays must
  // first get LeaveDone.
  absl::Status CheckFinish(std::uint32_t rank) const;

  // ---- What ends the job

  // ABORTED RANK_FINISHED if a rank has begun something that needs a rank that has finished;
  // otherwise OK.
  absl::Status FinishedRankIsNeeded(const Clock& clock) const;

 private:
  // `message`: what the rank sent.
  absl::Status CheckIdle(std::uint32_t rank, absl::string_view message, bool exit) const;
  absl::Status Breach(std::uint32_t rank, absl::string_view what) const;

  const JobTerms& terms_;
  const Membership& members_;
  const LayoutSet& layouts_;
  const OperationChannel& operations_;
  const CollectiveOrder& collectives_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_RANK_RULES_H_
