#include "daemon/job/rank_rules.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "proto/gradsync/duration_text.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

absl::Status RankRules::CheckJoin(std::uint32_t rank, std::uint32_t world_size,
                                  const JobOptions& options, bool active) const {
  const std::string difference =
      world_size != members_.world_size()
          ? absl::StrCat("world_size is ", world_size, ", but the ranks that joined before have ",
                         members_.world_size())
          : FirstDifference(terms_.options, options);
  if (!difference.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kJobMismatch,
                     absl::StrCat("job '", terms_.job_id, "', rank ", rank, ": ", difference,
                                  ". Start every rank with the same options."),
                     {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  const RankState state = members_[rank].state;
  if (active && (state == RankState::kAbsent || state == RankState::kHeld)) return absl::OkStatus();
  if (active && terms_.options.Holds() && members_.Formed()) {
    return MakeError(absl::StatusCode::kAlreadyExists, reason::kRankOccupied,
                     absl::StrCat("rank ", rank, " of job '", terms_.job_id,
                                  "' has a live session. With on_rank_loss=hold another one can "
                                  "join only after its loss; give another run another job_id."),
                     {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  return MakeError(absl::StatusCode::kAlreadyExists, reason::kRankOccupied,
                   absl::StrCat("rank ", rank, " of job '", terms_.job_id,
                                "' is held by a live session while the job is still forming. Give "
                                "each trainer its own RANK, or each run its own job_id."),
                   {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

// ---- What the rank says -------------------------------------------------------------------------

absl::Status RankRules::Breach(std::uint32_t rank, absl::string_view what) const {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, what,
                   {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

absl::Status RankRules::CheckTakesPart(std::uint32_t rank, std::uint64_t sequence) const {
  const RankState state = members_[rank].state;
  if (state == RankState::kLive) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
      absl::StrCat("rank ", rank, ", operation ", sequence, " of the job's channel: ",
                   CameBack(state) ? "this rank came back after a loss, and takes part in no "
                                     "operation until its first step is complete"
                                   : "this rank has left, and takes part in nothing until "
                                     "LeaveDone"),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, 0}});
}

absl::Status RankRules::CheckOperation(std::uint32_t rank, std::uint64_t sequence,
                                       const OperationSpec& spec) const {
  if (absl::Status status = CheckTakesPart(rank, sequence); !status.ok()) return status;
  if (spec.kind != OperationKind::kBroadcast || spec.root < members_.world_size() ||
      spec.root == kRootIsLowestLive) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, reason::kUnknownRank,
      absl::StrCat("broadcast from rank ", spec.root, " in a world of ", members_.world_size()));
}

absl::Status RankRules::CheckHeals(std::uint32_t rank, absl::string_view message) const {
  if (terms_.options.HealsFromSurvivors()) return absl::OkStatus();
  return Breach(rank, absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' sent ", message,
                                   ", which needs on_rank_loss=hold with state_source=survivor"));
}

absl::Status RankRules::CheckLeave(std::uint32_t rank, bool exit) const {
  if (members_.IsLeaving(rank) || (members_[rank].state == RankState::kStayed && !exit)) {
    return Breach(rank, absl::StrCat("rank ", rank, " sent Leave twice. Leave once."));
  }
  return CheckIdle(rank, "Leave", exit);
}

absl::Status RankRules::CheckFinish(std::uint32_t rank) const {
  if (members_.IsLeaving(rank)) {
    return Breach(rank, absl::StrCat("rank ", rank, " sent Leave or Finish twice. Leave once."));
  }
  if (members_[rank].state == RankState::kStayed) {
    return Breach(rank, absl::StrCat("rank ", rank,
                                     " sent Finish while it stays: it takes part again when every "
                                     "rank has left. Wait for LeaveDone."));
  }
  return CheckIdle(rank, "Finish", /*exit=*/true);
}

absl::Status RankRules::CheckIdle(std::uint32_t rank, absl::string_view message, bool exit) const {
  if (members_[rank].state == RankState::kLoading) {
    return Breach(rank,
                  absl::StrCat("rank ", rank, " of job '", terms_.job_id, "' sent ", message,
                               ", but it came back after a loss and does not have the state of the "
                               "model yet. Send FetchState and StateDigests, and wait for "
                               "StateAdmitted first."));
  }
  // If the loss came after the last step, no step will ever heal the rank.
  if (CameBack(members_[rank].state) && (!exit || layouts_.HasGradientsOfEarlier(rank))) {
    return Breach(
        rank, absl::StrCat("rank ", rank, " sent ", message, " after it came back from a loss. ",
                           exit ? "The running step has gradients of its lost session: "
                                  "complete that step first."
                                : "It can stay only after it has completed a step of every "
                                  "layout."));
  }
  if (!operations_.InOperation(rank) && !layouts_.HasBegunStep(rank)) return absl::OkStatus();
  return Breach(rank,
                absl::StrCat("rank ", rank, " sent ", message,
                             " in the middle of a step or operation. Wait for the end of that "
                             "step or operation first."));
}

// ---- What ends the job --------------------------------------------------------------------------

absl::Status RankRules::FinishedRankIsNeeded(const Clock& clock) const {
  if (!members_.finished().has_value()) return absl::OkStatus();
  const bool begun_any =
      operations_.in_progress() || layouts_.AnyIsBegun() || collectives_.AnyIsBeyondFinished();
  if (!begun_any) return absl::OkStatus();
  for (std::uint32_t rank = 0; rank < members_.world_size(); ++rank) {
    std::uint32_t finished = *members_.finished();
    std::string begun = operations_.InOperation(rank)
                            ? absl::StrCat("operation ", operations_.next_sequence() - 1)
                            : layouts_.BegunBy(rank);
    // A rank may finish while others are still in the collectives that it has begun.
    const bool beyond = begun.empty() && collectives_.IsBeyondFinished(rank);
    for (std::uint32_t other = 0; beyond && other < members_.world_size() && begun.empty();
         ++other) {
      if (members_[other].state != RankState::kFinished) continue;
      finished = other;
      begun = collectives_.BegunBeyond(rank, other);
    }
    if (begun.empty()) continue;
    const absl::Duration ago = absl::Nanoseconds(clock.NowNs() - members_[finished].left_ns);
    return MakeError(
        absl::StatusCode::kAborted, reason::kRankFinished,
        absl::StrCat("rank ", members_.Name(finished), " of job '", terms_.job_id, "' finished ",
                     DurationText(ago),
                     " ago: its process came to a good end without leaving the job. Rank ",
                     members_.Name(rank), " has begun ", begun,
                     ", which needs it. Give every rank the same number of steps, or let a rank "
                     "that has no more data wait for the others (join(), LeaveAndStay) or, without "
                     "on_rank_loss=hold, leave."),
        {{field::kJob, terms_.job_id}, {field::kRank, finished}});
  }
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
