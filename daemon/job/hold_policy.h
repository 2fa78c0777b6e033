// Policy `hold`: after which losses the job goes on, what ends a job that holds a rank, and which
// ranks have the state of the model for the replacement.
//
// Job asks HoldPolicy at each event that the policy decides. Another loss policy would be a class
// beside this one, and Job would ask it at the same events. docs/failures.md, "Where a new loss
// policy goes", lists what else changes.

#ifndef DAEMON_JOB_HOLD_POLICY_H_
#define DAEMON_JOB_HOLD_POLICY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_set.h"
#include "daemon/job/membership.h"
#include "daemon/job/operation_channel.h"
#include "daemon/job/state_healing.h"

namespace gradsync::daemon {

// Looks at the parts of a job and answers with values. It changes no part: Job alone holds ranks,
// ends sessions and stops. In a job with another policy the answers are OK and false, and
// WhyNotHeld() and StandingOf() are not asked.
//
// Externally synchronized: guarded by the job's lock. Owns only the time that ranks have waited.
class HoldPolicy {
 public:
  // All of them outlive this object.
  HoldPolicy(const JobTerms& terms, const Membership& members, const LayoutSet& layouts,
             const OperationChannel& operations)
      : terms_(terms), members_(members), layouts_(layouts), operations_(operations) {}

  // Why the loss of this rank ends the job: "not every rank had joined"; empty if the rank is held.
  // `why`: how the daemon knows of the loss.
  std::string WhyNotHeld(std::uint32_t rank, const absl::Status& why) const;

  // ---- What ends the job. Each returns the error that every rank gets; OK if the job goes on.

  // ABORTED RANK_LOST if the operation needs a rank that is lost or has not healed.
  absl::Status LostRankIsNeeded(std::uint64_t sequence, const OperationSpec& spec) const;
  // ABORTED RANK_LOST if `staying`, which has called LeaveAndStay, waits while another rank is lost
  // or healing. Reason: the last rank to leave broadcasts the state of the model, and that other
  // rank may not have it.
  absl::Status StaysDuringLoss(std::uint32_t staying) const;
  // With state_source `survivor`: ABORTED RANK_LOST if a lost rank had ended the running step of
  // one layout and not that of another. Then no survivor has the state with which its replacement
  // would have to begin.
  absl::Status StepsOverlap() const;
  // ABORTED RANK_LOST if others have waited for a lost rank for hold_timeout. Called at each tick.
  absl::Status HeldTooLong(std::uint64_t now_ns);
  // ABORTED RANK_FINISHED if a rank has begun a step or a layout after another one has left for
  // good: every step needs every rank.
  absl::Status LeftEarly(const Clock& clock) const;
  // UNIMPLEMENTED LOSS_POLICY: the rank begins a collective that does not go through the daemon.
  absl::Status CollectiveIsNotHeld(std::uint32_t rank, absl::string_view description) const;

  // ---- The state of the model

  // Where `rank` stands for `replacement`, which loads the state.
  StateHealing::Standing StandingOf(std::uint32_t rank, std::uint32_t replacement) const;

  // ---- Sessions that join and leave

  // Requires that the job has not ended. True if the rank's next session belongs to this job.
  // False: that session begins a new generation. `rank` may be beyond the world size.
  bool Replaceable(std::uint32_t rank) const;
  // True if the rank has left the job for good or finished, and every rank has joined. `rank` may
  // be beyond the world size.
  bool HasCompleted(std::uint32_t rank) const;
  // True if the sessions of ranks that have left for good must wait until every rank has left.
  // Reason: a rank may be lost before it has saved its work, and its replacement needs the state
  // that they have. False if a rank that is lost now could not be replaced: then those sessions end
  // at once.
  bool LeaversWait() const;

 private:
  // How long ranks have waited for lost ones since the last verdict.
  struct Wait {
    std::uint64_t steps_decided = 0;
    std::uint64_t waited_ns = 0;            // in waits that have ended
    std::optional<std::uint64_t> since_ns;  // when the present wait began; nullopt: no rank waits
  };

  const JobTerms& terms_;
  const Membership& members_;
  const LayoutSet& layouts_;
  const OperationChannel& operations_;
  Wait wait_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_HOLD_POLICY_H_
