#include "daemon/job/layout_agreement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/job/rank_list.h"

namespace gradsync::daemon {

LayoutAgreement::LayoutAgreement(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                                 std::uint32_t first_rank, const JobTerms& terms,
                                 Membership* members)
    : channel_(channel),
      spec_(std::make_shared<const LayoutSpec>(std::move(spec))),
      first_rank_(first_rank),
      terms_(terms),
      members_(members),
      replaces_(replaces),
      ranks_(members->world_size()) {}

void LayoutAgreement::Keep(std::uint32_t rank, LayoutRequest request) {
  next_deadline_ns_ = std::min(next_deadline_ns_, request.deadline_ns);
  RankState& mine = ranks_[rank];
  mine.registered = true;
  mine.request = std::move(request);
  mine.request.spec = LayoutSpec{};
  mine.request.plan.reset();
  mine.request.messages.clear();
  mine.request.charge = nullptr;
}

absl::Status LayoutAgreement::Register(std::uint32_t rank, LayoutRequest request,
                                       DeferredActions* actions) {
  if (failed()) return failure_;
  if (ranks_[rank].registered) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kAlreadyRegistered,
        absl::StrCat("rank ", rank, " has registered layout '", name(),
                     "' already. Give this one another name."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel_}});
  }
  // The agreement has taken the first rank's own spec.
  std::string difference =
      rank == first_rank_ ? "" : FirstDifference(*spec_, first_rank_, request.spec, rank);
  if (request.replaces != replaces_) {
    const auto replaced = [](std::uint32_t channel) {
      return channel == 0 ? std::string("no layout") : absl::StrCat("that of channel ", channel);
    };
    difference = absl::StrCat("replaces ", replaced(replaces_), " on rank ", first_rank_, ", ",
                              replaced(request.replaces), " on rank ", rank);
  }
  if (!difference.empty()) {
    ranks_[rank].refused = true;
    Fail(MakeError(
             absl::StatusCode::kFailedPrecondition, reason::kLayoutMismatch,
             absl::StrCat("layout '", name(), "' differs between ranks ",
                          members_->Name(first_rank_), " and ", members_->Name(rank), ": ",
                          difference, ". Build the same model, in the same order, on every rank."),
             {{field::kJob, terms_.job_id},
              {field::kRank, rank},
              {field::kOtherRank, first_rank_},
              {field::kChannel, channel_}}),
         actions);
    return failure_;
  }
  Keep(rank, std::move(request));
  return absl::OkStatus();
}

absl::Status LayoutAgreement::Rejoin(std::uint32_t rank, LayoutRequest request) {
  const std::string difference = FirstDifference(*spec_, first_rank_, request.spec, rank);
  if (!difference.empty()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kLayoutMismatch,
        absl::StrCat("layout '", name(), "' of rank ", members_->Name(rank),
                     ", which comes back after a loss, differs from the job's: ", difference,
                     ". Start the same program as on the other ranks."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel_}});
  }
  Keep(rank, std::move(request));
  return absl::OkStatus();
}

void LayoutAgreement::Refuse(std::uint32_t rank, const absl::Status& why,
                             DeferredActions* actions) {
  if (reached() && !ranks_[rank].memory.has_value()) {
    ranks_[rank].registered = false;
    ReleaseMemory(rank, actions);
  }
  if (!open()) return;
  // This rank gets the error as the answer to its own request.
  ranks_[rank].registered = false;
  ranks_[rank].refused = true;
  Fail(MakeError(
           why.code(), reason::kLayoutRefused,
           absl::StrCat("layout '", name(), "' was refused to rank ", rank, ": ", why.message()),
           {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel_}}),
       actions);
}

void LayoutAgreement::KeepMemory(std::uint32_t rank, std::shared_ptr<void> memory,
                                 DeferredActions* actions) {
  if (failed() || !ranks_[rank].registered) {
    actions->releases.push_back(std::move(memory));
  } else {
    ranks_[rank].kept = std::move(memory);
  }
}

absl::Status LayoutAgreement::Breach(std::uint32_t rank, absl::string_view what) const {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
      absl::StrCat("layout '", name(), "', rank ", rank, ": ", what),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel_}});
}

absl::Status LayoutAgreement::Mapped(std::uint32_t rank, RankMemory memory) {
  if (failed()) return absl::OkStatus();  // the rank knows, or soon will
  RankState& mine = ranks_[rank];
  if (!mine.registered || mine.memory.has_value()) {
    return Breach(rank, "ArenaMapped without a registration, or twice");
  }
  const std::string device = memory.gpu != nullptr ? memory.gpu->device() : "";
  if (device != mine.request.device) {
    return Breach(rank, "ArenaMapped of memory on another device than the requested one");
  }
  mine.memory = std::move(memory);
  mine.incarnation = members_->SessionOf(rank).incarnation;
  return absl::OkStatus();
}

bool LayoutAgreement::Complete() const {
  if (failed() || members_->StepRanks() == 0) return false;
  return !lacks_memory_.Any(members_->world_size(), [this](std::uint32_t rank) {
    return members_->IsAwaited(rank) && !ranks_[rank].memory.has_value();
  });
}

void LayoutAgreement::Reach(std::uint64_t fingerprint, std::uint64_t first_step,
                            DeferredActions* actions) {
  state_ = State::kReached;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].memory.has_value()) continue;
    members_->Send(rank, LayoutReadyMessage{channel_, fingerprint, first_step}, actions);
  }
}

void LayoutAgreement::Fail(const absl::Status& why, DeferredActions* actions) {
  state_ = State::kFailed;
  failure_ = why;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].registered) {
      members_->Send(rank, LayoutFailedMessage{ranks_[rank].request.request_id, why}, actions);
    }
    ReleaseMemory(rank, actions);  // safe, because no step has begun
  }
}

void LayoutAgreement::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  if (!open()) return;
  const auto is_late = [now_ns](const RankState& rank) {
    return rank.registered && now_ns >= rank.request.deadline_ns;
  };
  if (now_ns < next_deadline_ns_ || std::none_of(ranks_.begin(), ranks_.end(), is_late)) {
    if (late_notice_.Due(now_ns, channel_)) TellLate(now_ns, actions);
    return;
  }
  RankList absent, unmapped;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankState& mine = ranks_[rank];
    if (!members_->IsAwaited(rank)) continue;
    if (!mine.registered) {
      absent.Add(rank);
    } else if (!mine.memory.has_value()) {
      unmapped.Add(rank);
    }
  }
  const auto list = [](absl::string_view what, const RankList& ranks) {
    return ranks.empty() ? "" : absl::StrCat("; not ", what, " by rank ", ranks.Text());
  };
  Fail(MakeError(absl::StatusCode::kDeadlineExceeded, reason::kLayoutTimeout,
                 absl::StrCat("layout '", name(), "' was not agreed in time",
                              list("registered", absent), list("mapped", unmapped),
                              ". Check that those trainers run and use the same job_id.",
                              members_->AbsenceHint()),
                 {{field::kJob, terms_.job_id},
                  {field::kRank, absent.empty() ? unmapped.First() : absent.First()},
                  {field::kChannel, channel_}}),
       actions);
}

void LayoutAgreement::TellLate(std::uint64_t now_ns, DeferredActions* actions) {
  LateRanks late(*members_);
  std::vector<std::uint32_t> waiting;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!members_->IsAwaited(rank)) continue;
    if (ranks_[rank].memory.has_value()) {
      waiting.push_back(rank);
    } else {
      late.Add(rank, ranks_[rank].registered ? "mapped its memory" : "registered it");
    }
  }
  late_notice_.Tell(now_ns, absl::StrCat("layout '", name(), "'"), late, waiting, members_,
                    actions);
}

void LayoutAgreement::ReleaseMemory(std::uint32_t rank, DeferredActions* actions) {
  RankState& mine = ranks_[rank];
  if (mine.kept != nullptr) actions->releases.push_back(std::move(mine.kept));
  if (!mine.memory.has_value()) return;
  actions->releases.push_back(std::move(mine.memory->arena));
  if (mine.memory->gpu != nullptr) actions->releases.push_back(std::move(mine.memory->gpu));
  mine.memory.reset();
}

void LayoutAgreement::Lose(std::uint32_t rank, DeferredActions* actions) {
  RankState& mine = ranks_[rank];
  mine.registered = false;
  if (!mine.memory.has_value()) return ReleaseMemory(rank, actions);
  if (mine.memory->semaphores != nullptr) mine.memory->semaphores->Close();
  lost_.push_back({{rank, mine.incarnation}, std::move(mine.kept), *std::move(mine.memory)});
  mine.memory.reset();
}

void LayoutAgreement::ReleaseLostMemory(absl::FunctionRef<bool(RankSession)> keep,
                                        DeferredActions* actions) {
  const auto released = std::stable_partition(
      lost_.begin(), lost_.end(), [keep](const LostMemory& lost) { return keep(lost.session); });
  for (auto lost = released; lost != lost_.end(); ++lost) {
    actions->releases.push_back(std::move(lost->kept));
    actions->releases.push_back(std::move(lost->memory.arena));
    if (lost->memory.gpu != nullptr) actions->releases.push_back(std::move(lost->memory.gpu));
  }
  lost_.erase(released, lost_.end());
}

const RankMemory* LayoutAgreement::memory(RankSession session) const {
  const RankState& mine = ranks_[session.rank];
  if (mine.memory.has_value() && mine.incarnation == session.incarnation) return &*mine.memory;
  for (const LostMemory& lost : lost_) {
    if (lost.session.rank == session.rank && lost.session.incarnation == session.incarnation) {
      return &lost.memory;
    }
  }
  return nullptr;
}

}  // namespace gradsync::daemon
