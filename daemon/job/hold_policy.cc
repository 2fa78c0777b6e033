#include "daemon/job/hold_policy.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/job/rank_list.h"
#include "proto/gradsync/duration_text.h"

namespace gradsync::daemon {

std::string HoldPolicy::WhyNotHeld(std::uint32_t rank, const absl::Status& why) const {
  // A rank that loads has marked nothing, so no reduction reads its memory.
  const bool harmless = members_[rank].state == RankState::kLoading;
  if (!harmless && DetailsOf(why).reason != reason::kProcessEnded.text()) {
    return "its process may live, and write to its gradients";
  }
  if (!members_.Formed()) return "not every rank had joined";
  if (members_.Count(RankState::kStayed) > 0) return "some rank waits in LeaveAndStay";
  if (std::string need = operations_.NeedOf(rank); !need.empty()) return need;
  if (std::string why_none = layouts_.WhyNoReplacement(); !why_none.empty()) return why_none;
  for (std::uint32_t other = 0; other < members_.world_size(); ++other) {
    if (other == rank) continue;
    if (members_[other].state == RankState::kLive) return "";
    // It has loaded the state, and the others' digests agree.
    if (terms_.options.HealsFromSurvivors() && members_[other].state == RankState::kHealing) {
      return "";
    }
    if (members_.IsLeaving(other)) return "";
  }
  return "no other rank has the state of the model";
}

// ---- What ends the job --------------------------------------------------------------------------

absl::Status HoldPolicy::LostRankIsNeeded(std::uint64_t sequence, const OperationSpec& spec) const {
  if (!members_.AnyIsRecovering()) return absl::OkStatus();
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    if (!IsRecovering(members_[rank].state)) continue;
    if (operations_.DoesWithout(rank, spec)) continue;
    return MakeError(
        absl::StatusCode::kAborted, reason::kRankLost,
        absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' was lost, and operation ",
                     sequence, " (", spec.Describe(),
                     ") needs it. Steps that are not complete are void. Call only barriers, and "
                     "broadcasts from a root that you name, while a rank may be lost; join again "
                     "from every rank."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  return absl::OkStatus();
}

absl::Status HoldPolicy::StaysDuringLoss(std::uint32_t staying) const {
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    if (!IsRecovering(members_[rank].state)) continue;
    return MakeError(absl::StatusCode::kAborted, reason::kRankLost,
                     absl::StrCat("rank ", rank, " of job '", terms_.job_id,
                                  "' was lost and has not completed a step since, and rank ",
                                  staying, " waits in LeaveAndStay. Join again from every rank."),
                     {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  return absl::OkStatus();
}

absl::Status HoldPolicy::StepsOverlap() const {
  if (!terms_.options.HealsFromSurvivors() || !members_.AnyIsMissing()) return absl::OkStatus();
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    if (!IsMissing(members_[rank].state)) continue;
    const std::string steps = layouts_.EndedAndOwed(rank);
    if (steps.empty()) continue;
    return MakeError(
        absl::StatusCode::kAborted, reason::kRankLost,
        absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' was lost in the middle of ",
                     steps,
                     ", which run at the same time. It had ended only the first one, so no rank "
                     "has the state of the model that its replacement needs. Steps that are not "
                     "complete are void. Wait for a step's verdict before you begin a step of "
                     "another layout, or use state_source=trainer; join again from every rank."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  return absl::OkStatus();
}

absl::Status HoldPolicy::HeldTooLong(std::uint64_t now_ns) {
  if (!terms_.options.Holds()) return absl::OkStatus();
  const std::uint64_t decided = layouts_.StepsDecided();
  const bool all_live = !members_.AnyIsMissing() && members_.Count(RankState::kHealing) == 0;
  if (all_live || decided != wait_.steps_decided) wait_ = {decided, 0, std::nullopt};
  const bool leaver_waits = members_.AnyIsMissing() && members_.AnyIsLeaving();
  if (!leaver_waits && !layouts_.RankWaits()) {
    if (wait_.since_ns.has_value()) wait_.waited_ns += now_ns - *wait_.since_ns;
    wait_.since_ns.reset();
    return absl::OkStatus();
  }
  if (!wait_.since_ns.has_value()) wait_.since_ns = now_ns;
  if (wait_.waited_ns + now_ns - *wait_.since_ns < terms_.options.hold_timeout_ns) {
    return absl::OkStatus();
  }
  // If no rank is held, one has come back and loads no state, or maps no memory.
  const bool any_held = members_.Count(RankState::kHeld) > 0;
  const bool any_loads = members_.Count(RankState::kLoading) > 0;
  const RankState missing = any_held    ? RankState::kHeld
                            : any_loads ? RankState::kLoading
                                        : RankState::kHealing;
  RankList held;
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    if (members_[rank].state == missing) held.Add(rank);
  }
  return MakeError(
      absl::StatusCode::kAborted, reason::kRankLost,
      absl::StrCat("rank ", held.Text(), " of job '", terms_.job_id, "' was lost and did not ",
                   missing == RankState::kLoading ? "get the state of the model" : "come back",
                   " within hold_timeout, ",
                   DurationText(absl::Nanoseconds(terms_.options.hold_timeout_ns)),
                   ". Steps that are not complete are void. Start that rank again sooner, or raise "
                   "hold_timeout; then join again from every rank."),
      {{field::kJob, terms_.job_id}, {field::kRank, held.First()}});
}

absl::Status HoldPolicy::CollectiveIsNotHeld(std::uint32_t rank,
                                             absl::string_view description) const {
  if (!terms_.options.Holds()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnimplemented, reason::kLossPolicy,
      absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' called ", description,
                   ", which does not go through the daemon: with on_rank_loss=hold it would wait "
                   "for a lost rank in vain. Use abort, or the job's own operations."),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

absl::Status HoldPolicy::LeftEarly(const Clock& clock) const {
  if (!terms_.options.Holds() || !members_.exited().has_value()) return absl::OkStatus();
  if (!layouts_.AnyIsBegun()) return absl::OkStatus();
  const std::uint32_t left = *members_.exited();
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    const std::string begun = layouts_.BegunBy(rank);
    if (begun.empty()) continue;
    const absl::Duration ago = absl::Nanoseconds(clock.NowNs() - members_[left].left_ns);
    return MakeError(
        absl::StatusCode::kAborted, reason::kRankFinished,
        absl::StrCat("rank ", left, " of job '", terms_.job_id, "' left ", DurationText(ago),
                     " ago, and rank ", rank, " has begun ", begun,
                     ". With on_rank_loss=hold this needs every rank. Give every rank the same "
                     "number of steps, or let a rank that has no more data wait for the others "
                     "(join(), LeaveAndStay)."),
        {{field::kJob, terms_.job_id}, {field::kRank, left}, {field::kOtherRank, rank}});
  }
  return absl::OkStatus();
}

// ---- The state of the model ---------------------------------------------------------------------

StateHealing::Standing HoldPolicy::StandingOf(std::uint32_t rank, std::uint32_t replacement) const {
  const RankState state = members_[rank].state;
  if (state == RankState::kLive || state == RankState::kHealing) {
    if (layouts_.IsFrozenFor(rank, replacement)) return StateHealing::Standing::kFrozen;
    return layouts_.HasBegunFor(rank, replacement) ? StateHealing::Standing::kBegun
                                                   : StateHealing::Standing::kHasState;
  }
  return members_.IsLeaving(rank) ? StateHealing::Standing::kFrozen : StateHealing::Standing::kNone;
}

// ---- Sessions that join and leave ---------------------------------------------------------------

bool HoldPolicy::Replaceable(std::uint32_t rank) const {
  if (!terms_.options.Holds() || !members_.Formed()) return false;
  return rank >= members_.world_size() || TakesPart(members_[rank].state);
}

bool HoldPolicy::HasCompleted(std::uint32_t rank) const {
  if (!terms_.options.Holds() || !members_.Formed()) return false;
  if (rank >= members_.world_size()) return false;
  const RankState state = members_[rank].state;
  return state == RankState::kExited || state == RankState::kFinished;
}

bool HoldPolicy::LeaversWait() const {
  const bool replaceable =
      terms_.options.Holds() && members_.Formed() && layouts_.WhyNoReplacement().empty();
  return replaceable && !members_.AllHaveLeft();
}

}  // namespace gradsync::daemon
