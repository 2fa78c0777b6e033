#include "daemon/job/layout_set.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/job/pieces.h"
#include "daemon/job/rank_list.h"

namespace gradsync::daemon {
namespace {

// The most buckets of a layout, times the ranks of its job.
constexpr std::size_t kMaxBucketRanks = std::size_t{1} << 17;
// Released layouts whose statistics and steps people may still ask for.
constexpr std::size_t kReleasedKept = 4;
constexpr std::uint64_t kReleasedTimelineBytes = std::uint64_t{2} << 20;
// What is kept of a job that has ended: layouts, the steps of all of them, and ranks that were
// late.
constexpr std::size_t kRetiredKept = 64;
constexpr std::uint64_t kRetiredTimelineBytes = std::uint64_t{1} << 20;
constexpr std::size_t kStragglersKept = 16;

}  // namespace

LayoutSet::LayoutSet(const JobTerms& terms, Membership* members, std::size_t max_buckets_per_layout,
                     LayoutChannel::OnReduced reduced, LayoutChannel::OnCopied copied,
                     LayoutChannel::OnSignalled signalled)
    : terms_(terms),
      members_(members),
      max_buckets_per_layout_(max_buckets_per_layout),
      reduced_(std::move(reduced)),
      copied_(std::move(copied)),
      signalled_(std::move(signalled)) {}

// ---- Finding a layout ---------------------------------------------------------------------------

LayoutChannel* LayoutSet::Find(std::uint32_t channel) const {
  const auto found = layouts_.find(channel);
  return found == layouts_.end() ? nullptr : found->second.get();
}

bool LayoutSet::HadLayout(std::uint32_t channel) const {
  return channel >= 1 && channel <= last_channel_ && Find(channel) == nullptr;
}

absl::Status LayoutSet::UnknownChannel(std::uint32_t rank, std::uint32_t channel) const {
  return MakeError(
      absl::StatusCode::kInvalidArgument, reason::kUnknownChannel,
      absl::StrCat(
          "rank ", rank, ": there is no layout on channel ", channel,
          HadLayout(channel) ? "; it was replaced or released, or its agreement failed" : ""),
      {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
}

bool LayoutSet::Replacing(std::uint32_t rank, std::uint32_t channel) const {
  for (const auto& [number, layout] : layouts_) {
    if (!layout->ready() && layout->agreement().replaces() == channel) {
      return layout->agreement().Registered(rank);
    }
  }
  return false;
}

absl::StatusOr<LayoutChannel*> LayoutSet::OfRank(std::uint32_t rank, std::uint32_t channel) const {
  LayoutChannel* layout = Find(channel);
  if (layout == nullptr) return UnknownChannel(rank, channel);
  const auto breach = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank, what),
                     {{field::kJob, terms_.job_id},
                      {field::kRank, rank},
                      {field::kChannel, channel},
                      {field::kStep, layout->step()}});
  };
  if (!members_->MayMark(rank)) {
    return breach(
        (*members_)[rank].state == RankState::kLoading
            ? " came back after a loss, and may mark buckets only when it has the state of the "
              "model: send FetchState and StateDigests, and wait for StateAdmitted"
            : " has left: it takes part in no step");
  }
  if (absl::Status has = CheckHas(rank, *layout); !has.ok()) return has;
  if (layout->ready() && layout->agreement().memory(rank) == nullptr) {
    return breach(" came back after a loss, and has not registered this layout");
  }
  return layout;
}

bool LayoutSet::Released(std::uint32_t rank, std::uint32_t channel) const {
  const LayoutChannel* const layout = Find(channel);
  return layout != nullptr && layout->released(rank);
}

absl::Status LayoutSet::CheckHas(std::uint32_t rank, const LayoutChannel& layout) const {
  const std::string named =
      absl::StrCat(" layout '", layout.name(), "' on channel ", layout.channel());
  std::string what;
  if (layout.released(rank)) {
    what = absl::StrCat(" has released", named, ": it may not use it any more");
  } else if (Replacing(rank, layout.channel())) {
    what = absl::StrCat(" is replacing", named,
                        ": it may not use it until RegisterLayout is answered");
  } else {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                   absl::StrCat("rank ", rank, what),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kChannel, layout.channel()},
                    {field::kStep, layout.step()}});
}

// ---- Agreements ---------------------------------------------------------------------------------

bool LayoutSet::NeedsPlan(std::uint32_t rank, const LayoutRequest& request) const {
  return (*members_)[rank].state == RankState::kLive && FindPending(request) == nullptr;
}

absl::StatusOr<LayoutChannel*> LayoutSet::Register(std::uint32_t rank, LayoutRequest request,
                                                   DeferredActions* actions) {
  if (CameBack((*members_)[rank].state)) return Rejoin(rank, std::move(request));
  if ((*members_)[rank].state != RankState::kLive) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank,
                                  " has left: it cannot register a layout. Register layouts before "
                                  "Leave, or after LeaveDone."),
                     {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  if (absl::Status can = CheckCanAgree(request); !can.ok()) return can;
  if (absl::Status failed = TakeFailure(rank, request); !failed.ok()) return failed;
  LayoutChannel* layout = FindPending(request);
  if (absl::Status taken = CheckName(rank, request, layout); !taken.ok()) {
    if (layout != nullptr) layout->agreement().Refuse(rank, taken, actions);
    Settle(actions);
    return taken;
  }
  if (layout != nullptr) MatchReplacement(rank, &request, &layout->agreement());
  if (layout == nullptr) {
    auto begun = BeginAgreement(rank, &request);
    if (!begun.ok()) return begun.status();
    layout = *begun;
  }
  absl::Status status = layout->agreement().Register(rank, std::move(request), actions);
  if (!status.ok()) {
    Settle(actions);
    return status;
  }
  return layout;
}

absl::StatusOr<LayoutChannel*> LayoutSet::Rejoin(std::uint32_t rank, LayoutRequest request) {
  const std::string& name = request.spec.name;
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready() || layout->name() != name || layout->released(rank)) continue;
    if (layout->agreement().Registered(rank)) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, reason::kAlreadyRegistered,
          absl::StrCat("rank ", rank, " has registered layout '", name, "' already."),
          {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
    }
    absl::Status same = layout->agreement().Rejoin(rank, std::move(request));
    if (!same.ok()) return same;
    return layout.get();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kLayoutMismatch,
                   absl::StrCat("rank ", members_->Name(rank),
                                ", which comes back after a loss, registers layout '", name,
                                "', which the job does not have. Start the same program as on the "
                                "other ranks."),
                   {{field::kJob, terms_.job_id}, {field::kRank, rank}});
}

absl::Status LayoutSet::CheckCanAgree(const LayoutRequest& request) const {
  const std::string subject = absl::StrCat("layout '", request.spec.name, "' cannot be agreed: ");
  if (terms_.options.Holds() && !request.device.empty()) {
    return MakeError(absl::StatusCode::kUnimplemented, reason::kLossPolicy,
                     absl::StrCat(subject,
                                  "on_rank_loss=hold needs gradients in host memory, and this one "
                                  "asks for a GPU; use abort"),
                     {{field::kJob, terms_.job_id}});
  }
  const bool recovering = members_->AnyIsRecovering();
  for (std::uint32_t rank = 0; recovering && rank < members_->world_size(); ++rank) {
    if (!IsRecovering((*members_)[rank].state)) continue;
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kRanksLeft,
                     absl::StrCat(subject, "rank ", rank,
                                  " was lost, and its next session has not completed a step. "
                                  "Register layouts after that."),
                     {{field::kJob, terms_.job_id}, {field::kRank, rank}});
  }
  return RanksLeft(request.spec.name);
}

absl::Status LayoutSet::RanksLeft(absl::string_view layout) const {
  if (members_->stayed().empty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kRanksLeft,
                   absl::StrCat("layout '", layout, "' cannot be agreed: rank ",
                                RankList(members_->stayed()).Text(),
                                " left, and stays until every rank has. Register layouts before "
                                "the first Leave, or after LeaveDone."),
                   {{field::kJob, terms_.job_id}, {field::kRank, members_->stayed().front()}});
}

LayoutChannel* LayoutSet::FindPending(const LayoutRequest& request) const {
  LayoutChannel* same_name = nullptr;
  for (const auto& [channel, layout] : layouts_) {
    if (layout->ready()) continue;
    // Counts before the name: a layout has at most one replacement.
    if (request.replaces != 0 && layout->agreement().replaces() == request.replaces) {
      return layout.get();
    }
    if (same_name == nullptr && layout->name() == request.spec.name) same_name = layout.get();
  }
  return same_name;
}

absl::Status LayoutSet::CheckName(std::uint32_t rank, const LayoutRequest& request,
                                  const LayoutChannel* pending) const {
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready() || layout->name() != request.spec.name || layout->released(rank)) continue;
    if (channel == request.replaces) continue;
    if (pending != nullptr && channel == pending->agreement().replaces()) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kAlreadyRegistered,
        absl::StrCat("rank ", rank, " has registered layout '", request.spec.name,
                     "' already, on channel ", channel,
                     ". Release or replace it, or give this one another name."),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
  }
  return absl::OkStatus();
}

void LayoutSet::MatchReplacement(std::uint32_t rank, LayoutRequest* request,
                                 LayoutAgreement* agreement) const {
  const std::uint32_t replaces = agreement->replaces();
  if (request->replaces == 0 && Released(rank, replaces)) request->replaces = replaces;
  if (request->replaces == 0 || replaces != 0) return;
  // Its first rank registered it before there was the other layout: it has a place of its own.
  if (request->replaces > agreement->channel()) return;
  for (std::uint32_t other = 0; other < members_->world_size(); ++other) {
    if (agreement->Registered(other) && !Released(other, request->replaces)) return;
  }
  agreement->Replace(request->replaces);
}

absl::StatusOr<LayoutChannel*> LayoutSet::BeginAgreement(std::uint32_t rank,
                                                         LayoutRequest* request) {
  std::size_t kept = 0;
  for (const auto& [channel, layout] : layouts_) {
    // There is at most one replacement of each layout.
    if (layout->ready() || layout->agreement().replaces() == 0) ++kept;
  }
  // Seldom made here: another agreement has failed since NeedsPlan().
  if (!request->plan.has_value()) {
    request->plan = PlanLayout(request->spec, max_buckets_per_layout_);
  }
  absl::StatusOr<LayoutPlan>& plan = *request->plan;
  if (!plan.ok()) return plan.status();
  if ((request->replaces == 0 && kept >= kMaxLayouts) ||
      plan->buckets.size() * members_->world_size() > kMaxBucketRanks ||
      last_channel_ == std::numeric_limits<std::uint32_t>::max()) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("job '", terms_.job_id, "' has ", kept, " layouts, and this one has ",
                     plan->buckets.size(), " buckets for each of ", members_->world_size(),
                     " ranks; a job may have ", kMaxLayouts, " layouts, and a layout ",
                     kMaxBucketRanks,
                     " buckets over all ranks: release a layout, or raise bucket_cap_bytes"));
  }
  auto charge =
      terms_.account.Reserve(LayoutChannel::BytesFor(request->spec, *plan, members_->world_size()));
  if (!charge.ok()) return charge.status();
  const std::uint32_t channel = ++last_channel_;
  auto& layout = layouts_[channel];
  layout = std::make_unique<LayoutChannel>(channel, std::move(request->spec), request->replaces,
                                           rank, *std::move(plan), terms_, members_, reduced_,
                                           copied_, signalled_);
  layout->Charge(*std::move(charge));
  return layout.get();
}

absl::Status LayoutSet::TakeFailure(std::uint32_t rank, const LayoutRequest& request) {
  for (auto it = failures_.begin(); it != failures_.end(); ++it) {
    if (it->name != request.spec.name || it->replaces != request.replaces || !it->unaware[rank]) {
      continue;
    }
    it->unaware[rank] = false;
    absl::Status status = it->status;
    if (DetailsOf(status).reason == reason::kLayoutTimeout) {
      status = MakeError(status.code(), DetailsOf(status),
                         absl::StrCat(status.message(), " This rank, ", rank, ", came too late."));
    }
    const auto& unaware = it->unaware;
    if (std::find(unaware.begin(), unaware.end(), true) == unaware.end()) failures_.erase(it);
    return status;
  }
  return absl::OkStatus();
}

void LayoutSet::RememberFailure(LayoutChannel* layout) {
  FailedAgreement failure{layout->name(),
                          layout->agreement().replaces(),
                          layout->agreement().failure(),
                          std::vector<bool>(members_->world_size()),
                          {}};
  bool late = false;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    failure.unaware[rank] = members_->IsAwaited(rank) && !layout->agreement().KnowsFailure(rank);
    late = late || failure.unaware[rank];
  }
  if (!late) return;
  if (failures_.size() >= kMaxLayouts) failures_.erase(failures_.begin());
  failure.charge =
      layout->SplitCharge(sizeof(FailedAgreement) + failure.name.size() +
                          failure.status.message().size() + failure.unaware.size() / 8);
  failures_.push_back(std::move(failure));
}

void LayoutSet::Settle(DeferredActions* actions) {
  for (auto it = layouts_.begin(); it != layouts_.end();) {
    LayoutChannel& layout = *it->second;
    if (layout.agreement().failed()) {
      RememberFailure(&layout);
      it = layouts_.erase(it);
      continue;
    }
    // May erase another layout, but not this one: `it` stays valid.
    if (!layout.ready() && layout.agreement().Complete()) BeginSteps(&layout, actions);
    ++it;
  }
}

void LayoutSet::BeginSteps(LayoutChannel* layout, DeferredActions* actions) {
  const auto replaced = layouts_.find(layout->agreement().replaces());
  if (replaced == layouts_.end()) return layout->Begin(nullptr, actions);
  // A rank has released the layout in the middle of a step, or the executor still ends a void step.
  // The next tick comes back.
  if (replaced->second->running()) return;
  layout->Begin(replaced->second.get(), actions);
  // Also releases the layout's memory, including its arenas.
  actions->releases.emplace_back(std::move(replaced->second));
  layouts_.erase(replaced);
}

void LayoutSet::Refuse(std::uint32_t rank, std::uint32_t channel, const absl::Status& why,
                       DeferredActions* actions) {
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr) return;
  layout->agreement().Refuse(rank, why, actions);
  Settle(actions);
}

absl::Status LayoutSet::CheckReplaces(std::uint32_t rank, std::uint32_t channel) const {
  const auto layout = OfRank(rank, channel);
  if (!layout.ok()) return layout.status();
  const auto breach = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank, " replaces layout '", (*layout)->name(),
                                  "' on channel ", channel, ", ", what),
                     {{field::kJob, terms_.job_id},
                      {field::kRank, rank},
                      {field::kChannel, channel},
                      {field::kStep, (*layout)->step()}});
  };
  if (!(*layout)->ready()) return breach("which is not ready: wait for LayoutReady first");
  if ((*layout)->HasBegunStep(rank)) {
    return breach(absl::StrCat("whose step ", (*layout)->step(),
                               " it is in: end or abandon it and wait for StepDone first"));
  }
  return absl::OkStatus();
}

absl::Status LayoutSet::ArenaMapped(std::uint32_t rank, std::uint32_t channel, RankMemory memory,
                                    DeferredActions* actions) {
  // The call comes from the executor. In the meantime the agreement may have failed, or the rank
  // may have left and given up its memory.
  if (HadLayout(channel) || !TakesPart((*members_)[rank].state)) return absl::OkStatus();
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr) return UnknownChannel(rank, channel);
  absl::Status status = layout->agreement().Mapped(rank, std::move(memory));
  if (status.ok() && layout->ready()) layout->RankRejoined(rank, actions);
  Settle(actions);
  return status;
}

absl::Status LayoutSet::ReleaseLayout(std::uint32_t rank, std::uint32_t channel,
                                      std::uint64_t now_ns, DeferredActions* actions) {
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr) return UnknownChannel(rank, channel);
  if (absl::Status has = CheckHas(rank, *layout); !has.ok()) return has;
  if (!layout->ready()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
        absl::StrCat("rank ", rank, " releases layout '", layout->name(), "' on channel ", channel,
                     ", which is not ready: wait for LayoutReady first"),
        {{field::kJob, terms_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
  }
  layout->RankReleased(rank, now_ns, actions);
  any_released_ = true;
  return absl::OkStatus();
}

void LayoutSet::DropReleased(DeferredActions* actions) {
  if (!any_released_) return;
  any_released_ = false;
  for (auto it = layouts_.begin(); it != layouts_.end();) {
    if (it->second->ReleasedByAll()) {
      RememberReleased(it->first, it->second.get());
      actions->releases.emplace_back(std::move(it->second));
      it = layouts_.erase(it);
      continue;
    }
    any_released_ = any_released_ || it->second->AnyHasReleased();
    ++it;
  }
}

void LayoutSet::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) {
    layout->Tick(now_ns, actions);
    if (!layout->agreement().open() || !layout->agreement().Complete()) continue;
    if (LayoutChannel* const replaced = Find(layout->agreement().replaces())) {
      replaced->VoidUnused(now_ns, actions);
    }
  }
  Settle(actions);
}

// ---- Membership ---------------------------------------------------------------------------------

bool LayoutSet::HasBegunStep(std::uint32_t rank) const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->HasBegunStep(rank)) return true;
  }
  return false;
}

void LayoutSet::RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns,
                         DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready() && !exited) layout->agreement().Fail(RanksLeft(layout->name()), actions);
    layout->RankLeft(rank, exited, now_ns, actions);
  }
  Settle(actions);
}

bool LayoutSet::WriteMissedWords(std::function<void()> done, DeferredActions* actions) const {
  std::vector<std::function<void()>> pieces;
  std::size_t words = 0;
  for (const auto& [channel, layout] : layouts_) {
    for (const std::uint32_t rank : members_->stayed()) layout->AddMissedWords(rank, &pieces);
    words += layout->plan().buckets.size() * members_->stayed().size();
  }
  if (words <= terms_.signalled_at_once || pieces.empty()) {
    for (const auto& piece : pieces) piece();
    return false;
  }
  Pieces work(std::move(done));
  for (auto& piece : pieces) work.Add(std::move(piece));
  work.Begin(actions);
  return true;
}

void LayoutSet::RankResumed(std::uint32_t rank) {
  for (const auto& [channel, layout] : layouts_) layout->RankResumed(rank);
  failures_.clear();  // from before the ranks left
}

void LayoutSet::RankLost(std::uint32_t rank, std::uint64_t now_ns, DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) layout->RankLost(rank, now_ns, actions);
}

void LayoutSet::ResumeDeadlines(std::uint64_t now_ns) {
  for (const auto& [channel, layout] : layouts_) layout->ResumeDeadline(now_ns);
}

bool LayoutSet::RankWaits() const {
  return std::any_of(layouts_.begin(), layouts_.end(),
                     [](const auto& entry) { return entry.second->RankWaits(); });
}

bool LayoutSet::AllRunningSteps(std::uint32_t replacement,
                                absl::FunctionRef<bool(const LayoutChannel&)> pass) const {
  bool in_step = false;
  for (const auto& [channel, layout] : layouts_) {
    // A step of a layout that some rank has released is void soon, and changes no state.
    if (!layout->running() || layout->released(replacement)) continue;
    if (!pass(*layout)) return false;
    in_step = true;
  }
  return in_step;
}

bool LayoutSet::IsFrozenFor(std::uint32_t rank, std::uint32_t replacement) const {
  return AllRunningSteps(replacement, [rank, replacement](const LayoutChannel& layout) {
    return layout.IsFrozenFor(rank, replacement);
  });
}

bool LayoutSet::HasBegunFor(std::uint32_t rank, std::uint32_t replacement) const {
  return AllRunningSteps(replacement, [rank, replacement](const LayoutChannel& layout) {
    return layout.HasBegunFor(rank, replacement);
  });
}

std::string LayoutSet::EndedAndOwed(std::uint32_t rank) const {
  const LayoutChannel* ended = nullptr;
  const LayoutChannel* owed = nullptr;
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->may_complete() || layout->released(rank)) continue;
    (layout->HasEndedStep(rank) ? ended : owed) = layout.get();
  }
  if (ended == nullptr || owed == nullptr) return "";
  return absl::StrCat("steps ", ended->step(), " of layout '", ended->name(), "' and ",
                      owed->step(), " of layout '", owed->name(), "'");
}

bool LayoutSet::HasGradientsOfEarlier(std::uint32_t rank) const {
  return std::any_of(layouts_.begin(), layouts_.end(), [rank](const auto& entry) {
    return entry.second->HasGradientsOfEarlier(rank);
  });
}

std::vector<std::uint32_t> LayoutSet::HealRanks(
    absl::FunctionRef<bool(std::uint32_t rank)> may_heal) {
  if (members_->Count(RankState::kHealing) == 0) return {};
  std::vector<std::uint32_t> healed;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const Member& member = (*members_)[rank];
    if (member.state != RankState::kHealing || !member.stepped) continue;
    const bool ready = std::all_of(layouts_.begin(), layouts_.end(), [rank](const auto& entry) {
      return entry.second->OwesNothing(rank);
    });
    if (!ready || !may_heal(rank)) continue;
    members_->Heal(rank);
    healed.push_back(rank);
  }
  return healed;
}

std::uint64_t LayoutSet::StepsDecided() const {
  std::uint64_t steps = 0;
  for (const auto& [channel, layout] : layouts_) steps += layout->step();
  return steps;
}

std::string LayoutSet::WhyNoReplacement() const {
  if (layouts_.empty()) return "no layout was registered";
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready()) return absl::StrCat("layout '", layout->name(), "' was being agreed");
    if (!layout->can_replace_ranks())
      return absl::StrCat("layout '", layout->name(), "' had no complete step");
  }
  return "";
}

std::vector<CurrentLayout> LayoutSet::CurrentFor(std::uint32_t rank) const {
  std::vector<CurrentLayout> current;
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready() || layout->released(rank)) continue;
    current.push_back({layout->agreement().shared_spec(), layout->step()});
  }
  return current;
}

std::vector<LeaveDoneMessage::NextStep> LayoutSet::NextSteps() const {
  std::vector<LeaveDoneMessage::NextStep> steps;
  for (const auto& [channel, layout] : layouts_) steps.push_back({channel, layout->step()});
  return steps;
}

// ---- The end of the job -------------------------------------------------------------------------

void LayoutSet::Stop() {
  for (const auto& [channel, layout] : layouts_) layout->Stop();
}

void LayoutSet::GiveUp(DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) layout->GiveUp(actions);
}

void LayoutSet::FinishSeen(std::uint64_t now_ns, DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) layout->FinishSeen(now_ns, actions);
}

void LayoutSet::ReleaseMemory(DeferredActions* actions) {
  for (const auto& [channel, layout] : layouts_) layout->ReleaseMemory(actions);
}

bool LayoutSet::in_flight() const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->in_flight() > 0) return true;
  }
  return false;
}

bool LayoutSet::StepRunning() const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->running()) return true;
  }
  return false;
}

bool LayoutSet::AnyIsBegun() const {
  return std::any_of(layouts_.begin(), layouts_.end(), [](const auto& entry) {
    return entry.second->running() || entry.second->agreement().open();
  });
}

std::string LayoutSet::BegunBy(std::uint32_t rank) const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->HasBegunStep(rank)) {
      return absl::StrCat("step ", layout->step(), " of layout '", layout->name(), "'");
    }
    if (layout->agreement().open() && layout->agreement().Registered(rank)) {
      return absl::StrCat("layout '", layout->name(), "'");
    }
  }
  return "";
}

// ---- For people ---------------------------------------------------------------------------------

absl::Status LayoutSet::LossOf(std::uint32_t rank, const absl::Status& why) const {
  std::string where = "between steps";
  std::string channel = "0", step, bucket;
  for (const auto& [number, layout] : layouts_) {
    if (layout->agreement().failed()) continue;
    if (layout->released(rank) && !layout->running()) continue;
    if (!layout->ready()) {
      where = absl::StrCat("while layout '", layout->name(), "' was being ",
                           layout->agreement().replaces() == 0 ? "agreed" : "replaced");
      channel = absl::StrCat(layout->channel());
      step = bucket = "";
      continue;
    }
    channel = absl::StrCat(layout->channel());
    step = absl::StrCat(layout->step());
    // A rank that has left steps does not have to mark buckets.
    const bool owes = members_->IsAwaited(rank);
    const auto unmarked = owes ? layout->FirstUnmarked(rank) : std::nullopt;
    bucket = unmarked.has_value() ? absl::StrCat(*unmarked) : "";
    where = absl::StrCat(layout->running() ? "in" : "before", " step ", step, " of layout '",
                         layout->name(), "', ",
                         unmarked.has_value() ? absl::StrCat("bucket ", bucket, " not ready")
                         : owes               ? "every bucket ready"
                                              : "after it had left");
    if (layout->running()) break;
  }
  return MakeError(
      absl::StatusCode::kAborted, reason::kRankLost,
      absl::StrCat("rank ", members_->Name(rank), " of job '", terms_.job_id, "' was lost ", where,
                   "; known because ", why.message(),
                   ". Steps that are not complete are void. Start that rank again and join again "
                   "from every rank."),
      {{field::kJob, terms_.job_id},
       {field::kRank, rank},
       {field::kNode, members_->NodeOf(rank)},
       {field::kChannel, channel},
       {field::kStep, step},
       {field::kBucket, bucket}});
}

std::vector<std::uint32_t> LayoutSet::MissingRanks() const {
  std::vector<std::uint32_t> missing;
  for (const auto& [channel, layout] : layouts_) {
    const std::vector<std::uint32_t> ranks = layout->report().MissingRanks();
    missing.insert(missing.end(), ranks.begin(), ranks.end());
  }
  return missing;
}

std::vector<LayoutSnapshot> LayoutSet::Snapshot() const {
  std::vector<LayoutSnapshot> snapshot;
  for (const ReleasedLayout& retired : retired_) snapshot.push_back(retired.snapshot);
  for (const auto& [channel, layout] : layouts_) snapshot.push_back(SnapshotOf(channel, *layout));
  return snapshot;
}

void LayoutSet::Retire(DeferredActions* actions) {
  const std::size_t kept = std::min(layouts_.size(), kRetiredKept);
  std::size_t dropped = layouts_.size() - kept;
  for (auto& [channel, layout] : layouts_) {
    if (dropped == 0) {
      retired_.push_back(RemainsOf(channel, layout.get(), kRetiredTimelineBytes / kept));
    } else {
      --dropped;  // the newest ones are kept
    }
    actions->releases.emplace_back(std::move(layout));
  }
  layouts_.clear();
  failures_.clear();
  for (std::vector<ReleasedLayout>* const all : {&retired_, &released_}) {
    for (ReleasedLayout& one : *all) one.remains.charge.LeaveOrigin();
  }
}

LayoutSet::ReleasedLayout LayoutSet::RemainsOf(std::uint32_t channel, LayoutChannel* layout,
                                               std::uint64_t timeline_bytes) {
  LayoutSnapshot snapshot = SnapshotOf(channel, *layout);
  auto& stragglers = snapshot.stats.stragglers;
  if (stragglers.size() > kStragglersKept) stragglers.resize(kStragglersKept);
  stragglers.shrink_to_fit();
  return {std::move(snapshot), layout->TakeRemains(timeline_bytes)};
}

std::vector<StepTimes> LayoutSet::TimelineOf(const ReleasedLayout& layout, std::size_t steps) {
  if (layout.remains.timeline == nullptr) return {};
  return layout.remains.timeline->Last(steps);
}

LayoutSnapshot LayoutSet::SnapshotOf(std::uint32_t channel, const LayoutChannel& layout) {
  return {layout.name(),
          channel,
          layout.plan().fingerprint,
          layout.spec().parameters.size(),
          layout.plan().buckets.size(),
          layout.plan().arena_bytes,
          layout.step(),
          layout.report().Missing(),
          layout.ready(),
          layout.stats().Snapshot()};
}

void LayoutSet::RememberReleased(std::uint32_t channel, LayoutChannel* layout) {
  const auto same_name = [layout](const ReleasedLayout& released) {
    return released.snapshot.name == layout->name();
  };
  released_.erase(std::remove_if(released_.begin(), released_.end(), same_name), released_.end());
  if (released_.size() == kReleasedKept) released_.erase(released_.begin());
  released_.push_back(RemainsOf(channel, layout, kReleasedTimelineBytes));
}

std::vector<LayoutSnapshot> LayoutSet::ReleasedSnapshot() const {
  std::vector<LayoutSnapshot> snapshot;
  for (const ReleasedLayout& released : released_) {
    const bool followed =
        std::any_of(layouts_.begin(), layouts_.end(), [&released](const auto& layout) {
          return layout.second->name() == released.snapshot.name;
        });
    if (!followed) snapshot.push_back(released.snapshot);
  }
  return snapshot;
}

std::optional<std::vector<StepTimes>> LayoutSet::Timeline(absl::string_view layout,
                                                          std::size_t steps) const {
  for (const auto& [channel, candidate] : layouts_) {
    if (candidate->name() == layout) return candidate->timeline().Last(steps);
  }
  for (const ReleasedLayout& released : released_) {
    if (released.snapshot.name == layout) return TimelineOf(released, steps);
  }
  for (const ReleasedLayout& retired : retired_) {
    if (retired.snapshot.name == layout) return TimelineOf(retired, steps);
  }
  return std::nullopt;
}

}  // namespace gradsync::daemon
