#include "daemon/job/layout_channel.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/job/done_word_turns.h"
#include "daemon/job/pieces.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

using Phase = RunningStep::Phase;

// How long a step waits for a rank that has released the layout. A process that ends, or leaves the
// job, may release its layouts first: then its end says more.
constexpr std::uint64_t kReleasePatienceNs = 5'000'000'000;
constexpr std::uint64_t kNoStep = ~std::uint64_t{0};
// A snapshot for status, with the names and the most frequent stragglers.
constexpr std::uint64_t kSnapshotBytes = 2048;

// The same bits, or both NaN.
bool Equal(const GradientStats& a, const GradientStats& b) {
  const bool both_nan = std::isnan(a.sum_of_squares) && std::isnan(b.sum_of_squares);
  return (both_nan || a.sum_of_squares == b.sum_of_squares) && a.non_finite == b.non_finite;
}

}  // namespace

LayoutChannel::LayoutChannel(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                             std::uint32_t first_rank, LayoutPlan plan, const JobTerms& terms,
                             Membership* members, OnReduced reduced, OnCopied copied,
                             OnSignalled signalled)
    : plan_(std::move(plan)),
      terms_(terms),
      members_(members),
      copied_(std::move(copied)),
      signalled_(std::move(signalled)),
      agreement_(channel, std::move(spec), replaces, first_rank, terms, members),
      reductions_(plan_, agreement_, terms, *members, this, std::move(reduced)),
      step_(NewStep(1)),
      early_(members->world_size()),
      last_ended_(members->world_size()),
      released_(members->world_size()),
      released_ns_(members->world_size()),
      first_step_(members->world_size()),
      stats_(members->world_size()),
      timeline_(std::make_unique<StepTimeline>(plan_.buckets.size(), members->world_size())) {}

std::uint64_t LayoutChannel::BytesFor(const LayoutSpec& spec, const LayoutPlan& plan,
                                      std::size_t ranks) {
  // In each bucket: a rank's buffer and semaphores in the reduction, its mark, its ready time here
  // and in the record of the last step.
  constexpr std::uint64_t kPerBucketAndRank = 64;
  constexpr std::uint64_t kPerBucket = sizeof(ReduceOperation) + 512;
  constexpr std::uint64_t kPerRank = 1024;
  const std::uint64_t used_map = spec.parameters.size() / 8;
  // On a GPU: the messages about the next step. Each may mark one bucket, and needs what it
  // captures (80 bytes), a vector of one index (32), and a place in a vector that grows by doubling
  // (64). The last one has a used map or a reason.
  constexpr std::uint64_t kPerEarlyMessage = 80 + 32 + 64;
  const std::uint64_t early_message = spec.on_gpu ? kPerEarlyMessage : 0;
  const std::uint64_t last_message = spec.on_gpu ? used_map + kMaxReasonBytes : 0;
  const std::uint64_t buckets = plan.buckets.size();
  return sizeof(LayoutChannel) + BytesOf(spec) + BytesOf(plan) +
         buckets * (kPerBucket + ranks * (kPerBucketAndRank + early_message)) +
         ranks * (kPerRank + used_map + last_message) + StepTimeline::BytesFor(buckets, ranks);
}

LayoutChannel::Remains LayoutChannel::TakeRemains(std::uint64_t timeline_bytes) {
  auto timeline = timeline_->LastWithin(timeline_bytes);
  const std::uint64_t bytes = timeline == nullptr ? 0 : timeline->bytes();
  return {std::move(timeline), charge_.Split(kSnapshotBytes + bytes)};
}

RunningStep LayoutChannel::NewStep(std::uint64_t number) const {
  return RunningStep(number, plan_.buckets.size(), members_->world_size(),
                     spec().parameters.size());
}

void LayoutChannel::Begin(LayoutChannel* replaced, DeferredActions* actions) {
  if (replaced != nullptr) {
    step_ = NewStep(replaced->step());
    stats_ = std::move(replaced->stats_);
    if (plan_.buckets.size() == replaced->plan_.buckets.size()) {
      std::swap(timeline_, replaced->timeline_);
    }
    std::fill(last_ended_.begin(), last_ended_.end(), step() - 1);
  }
  std::fill(first_step_.begin(), first_step_.end(), step());
  agreement_.Reach(plan_.fingerprint, step(), actions);
}

// ---- Messages of ranks --------------------------------------------------------------------------

absl::StatusOr<LayoutChannel::Admission> LayoutChannel::Admit(std::uint32_t rank,
                                                              std::uint64_t step,
                                                              absl::string_view what) const {
  if (!agreement_.reached()) {
    return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kArenaNotPopulated, rank,
                           step, std::nullopt, absl::StrCat(what, " before LayoutReady"));
  }
  const std::uint64_t current = step_.number();
  const bool ended = step_.Ended(rank);
  if (step < current && step > last_ended_[rank]) return Admission::kIgnore;
  if (step < current) {
    return report().Breach(
        absl::StatusCode::kFailedPrecondition, reason::kStaleStep, rank, step, std::nullopt,
        absl::StrCat(what, " for a step that is decided; the next one is ", current));
  }
  const auto after_end = [&] {
    return report().Breach(
        absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank, step, std::nullopt,
        absl::StrCat(what, " after this rank had ended the step; send it before EndStep"));
  };
  if (step == current + 1 && spec().on_gpu && ended) {
    if (early_.Ended(rank)) return after_end();
    return Admission::kEarly;
  }
  if (step > current) {
    return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank,
                           step, std::nullopt, absl::StrCat(what, " ahead of step ", current));
  }
  if (ended) {
    // The rank may not know yet that the step is void. Otherwise it is a breach.
    return step_.phase() == Phase::kVoid ? Admission::kIgnore
                                         : absl::StatusOr<Admission>(after_end());
  }
  return Admission::kAdmit;
}

absl::Status LayoutChannel::Postpone(std::uint32_t rank, std::uint64_t step, bool last,
                                     EarlyMessages::Message message) {
  // At most one message for each bucket, and one for the step's end.
  if (early_.Count(rank) > plan_.buckets.size()) {
    return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank,
                           step, std::nullopt,
                           absl::StrCat("more messages than the step has, before step ",
                                        step_.number(), " is decided"));
  }
  early_.Add(rank, std::move(message), last);
  return absl::OkStatus();
}

void LayoutChannel::StartStep(std::uint64_t now_ns) {
  if (step_.begun()) return;
  patience_ends_ns_ = now_ns + kReleasePatienceNs;
  step_.Begin(now_ns + terms_.options.step_timeout_ns);
  if (members_->AnyIsMissing()) step_.Suspend(now_ns);
}

void LayoutChannel::Mark(std::uint32_t rank, std::size_t index, std::uint64_t now_ns,
                         DeferredActions* actions) {
  StartStep(now_ns);
  const RankSession session = members_->SessionOf(rank);
  step_.Mark(session, index, now_ns);
  if (step_.NeedsAverage(session, index)) {
    if (step_.Reduced(index)) CopyAverage(index, rank, actions);
    return;
  }
  if (step_.ReadyRanks(index) == members_->StepRanks()) Launch(index, actions);
}

absl::Status LayoutChannel::TakePosition(std::uint32_t rank, std::optional<Position> position) {
  if (!position.has_value()) return absl::OkStatus();
  const auto other = step_.GivePosition(rank, *position);
  if (!other.has_value()) return absl::OkStatus();
  return report().PositionMismatch(rank, *position, *other);
}

absl::Status LayoutChannel::MarkReady(std::uint32_t rank, std::uint64_t step,
                                      absl::Span<const std::uint32_t> buckets,
                                      std::optional<Position> position, std::uint64_t now_ns,
                                      DeferredActions* actions) {
  const auto admission = Admit(rank, step, "BucketReady");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kIgnore) return absl::OkStatus();
  if (*admission == Admission::kEarly) {
    if (early_.CountMarks(rank, buckets.size()) > plan_.buckets.size()) {
      return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, rank,
                             step, std::nullopt, "more marks than the layout has buckets");
    }
    return Postpone(rank, step, /*last=*/false,
                    [this, rank, step, position,
                     kept = std::vector<std::uint32_t>(buckets.begin(), buckets.end())](
                        std::uint64_t then_ns, DeferredActions* then) {
                      return MarkReady(rank, step, kept, position, then_ns, then);
                    });
  }
  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;
  for (const std::uint32_t index : buckets) {
    if (index >= plan_.buckets.size()) {
      return report().Breach(
          absl::StatusCode::kInvalidArgument, reason::kUnknownBucket, rank, step, index,
          absl::StrCat("there is no such bucket; the layout has ", plan_.buckets.size()));
    }
    if (step_.Marked(rank, index)) {
      return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, rank,
                             step, index, "marked ready a second time in this step");
    }
    Mark(rank, index, now_ns, actions);
  }
  return absl::OkStatus();
}

absl::Status LayoutChannel::EndStep(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view used_map, std::optional<Position> position,
                                    std::uint64_t now_ns, DeferredActions* actions) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  UsedMap& used = step_.used_map();
  if (*admission == Admission::kEarly) {
    if (used_map.size() > used.bytes()) return report().MalformedMap(rank, step, used_map);
    return Postpone(rank, step, /*last=*/true,
                    [this, rank, step, position, kept = std::string(used_map)](
                        std::uint64_t then_ns, DeferredActions* then) {
                      return EndStep(rank, step, kept, position, then_ns, then);
                    });
  }
  if (*admission == Admission::kIgnore) {
    last_ended_[rank] = std::max(last_ended_[rank], step);
    return absl::OkStatus();
  }
  if (const auto unmarked = step_.FirstUnmarked(rank)) {
    return report().Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank,
                           step, unmarked, "EndStep, but this bucket was not marked ready");
  }
  if (!used_map.empty() && used_map.size() != used.bytes()) {
    return report().MalformedMap(rank, step, used_map);
  }
  if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;
  StartStep(now_ns);
  used.Add(used_map);
  step_.End(rank);
  MaybeFinish(now_ns, actions);
  return absl::OkStatus();
}

absl::Status LayoutChannel::FinishStep(std::uint32_t rank, std::uint64_t step,
                                       absl::string_view used_map, std::optional<Position> position,
                                       std::uint64_t now_ns, DeferredActions* actions) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kEarly) {
    if (used_map.size() > step_.used_map().bytes()) {
      return report().MalformedMap(rank, step, used_map);
    }
    return Postpone(rank, step, /*last=*/true,
                    [this, rank, step, position, kept = std::string(used_map)](
                        std::uint64_t then_ns, DeferredActions* then) {
                      return FinishStep(rank, step, kept, position, then_ns, then);
                    });
  }
  if (*admission == Admission::kAdmit) {
    if (absl::Status same = TakePosition(rank, position); !same.ok()) return same;
    for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
      if (!step_.Marked(rank, i)) Mark(rank, i, now_ns, actions);
    }
  }
  return EndStep(rank, step, used_map, std::nullopt, now_ns, actions);
}

absl::Status LayoutChannel::Abandon(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view reason, std::uint64_t now_ns,
                                    DeferredActions* actions) {
  const auto admission = Admit(rank, step, "AbandonStep");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kEarly) {
    return Postpone(rank, step, /*last=*/true,
                    [this, rank, step, kept = std::string(reason)](std::uint64_t then_ns,
                                                                   DeferredActions* then) {
                      return Abandon(rank, step, kept, then_ns, then);
                    });
  }
  if (*admission == Admission::kIgnore) {
    last_ended_[rank] = std::max(last_ended_[rank], step);
    return absl::OkStatus();
  }
  StartStep(now_ns);
  const auto unmarked = step_.FirstUnmarked(rank);
  step_.End(rank);
  Void(report().Breach(
           absl::StatusCode::kAborted, reason::kStepAbandoned, rank, step, unmarked,
           absl::StrCat("abandoned by this rank: ", reason,
                        ". The step is void on every rank; redo it under the next number.")),
       now_ns, actions);
  return absl::OkStatus();
}

void LayoutChannel::RankReleased(std::uint32_t rank, std::uint64_t now_ns,
                                 DeferredActions* actions) {
  if (!released_[rank]) ++released_ranks_;
  released_[rank] = true;
  released_ns_[rank] = now_ns;
  patience_ends_ns_ = now_ns + kReleasePatienceNs;
  ReleaseIfUnused(rank, actions);
}

void LayoutChannel::VoidUnused(std::uint64_t now_ns, DeferredActions* actions) {
  if (step_.phase() != Phase::kRunning || !AnyOwesEnd()) return;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    // A rank that is in the step cannot replace the layout, so it has released it.
    if (!released_[rank] || !step_.Has(rank)) continue;
    return Void(report().Released(rank), now_ns, actions);
  }
}

void LayoutChannel::ReleaseIfUnused(std::uint32_t rank, DeferredActions* actions) {
  if (released_[rank] && !step_.Has(rank) && early_.Count(rank) == 0) {
    agreement_.ReleaseMemory(rank, actions);
  }
}

bool LayoutChannel::ReleasedByAll() const {
  if (step_.begun() || !AnyHasReleased()) return false;
  return !uses_.Any(members_->world_size(), [this](std::uint32_t rank) {
    const RankState state = (*members_)[rank].state;
    return !released_[rank] && (TakesPart(state) || state == RankState::kStayed);
  });
}

std::optional<std::uint32_t> LayoutChannel::AwaitedInVain() const {
  if (step_.phase() != Phase::kRunning) return std::nullopt;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (released_[rank] && members_->IsAwaited(rank) && !step_.Ended(rank)) return rank;
  }
  return std::nullopt;
}

// ---- Reductions ---------------------------------------------------------------------------------

void LayoutChannel::Launch(std::size_t index, DeferredActions* actions) {
  if (!step_.Waiting(index) || step_.phase() != Phase::kRunning) return;
  step_.Submitted(index);
  actions->reductions.push_back(reductions_.Prepare(index, step_));
}

void LayoutChannel::Reduced(std::size_t index, const ReduceTimes& times, std::uint64_t now_ns,
                            DeferredActions* actions) {
  const ReduceOperation& operation = reductions_[index];
  step_.Done(index, times);
  if (spec().on_gpu) of_step_.gpu_verdict.Add(operation);
  if (step_.phase() == Phase::kCut) return;
  stats_.RecordBucket(step_.Times(index).ready_ns, times.start_ns, times.finish_ns,
                      operation.count * ItemSize(operation.dtype));
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (step_.NeedsAverage(members_->SessionOf(rank), index)) {
      CopyAverage(index, rank, actions);
    } else if (members_->IsAwaited(rank) && step_.Marked(rank, index) &&
               first_step_[rank] <= step()) {
      TellBucketDone(index, rank, actions);
    }
  }
  ReleaseLostMemory(actions);
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::TellBucketDone(std::size_t index, std::uint32_t rank,
                                   DeferredActions* actions) {
  if (!agreement_.bucket_done_messages(rank)) return;
  const BucketTimes& times = step_.Times(index);
  members_->Send(rank,
                 BucketDoneMessage{channel(), step(), static_cast<std::uint32_t>(index),
                                   times.start_ns, times.finish_ns},
                 actions);
}

RankSession LayoutChannel::AverageSource(std::size_t index) const {
  RankSession source;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const RankSession session{rank, step_.ReadySession(index, rank)};
    if (agreement_.memory(session) == nullptr) continue;
    source = session;
    // The memory of a lost session has the average, too, but its process may still write to it.
    if (members_->MayMark(rank) && session.incarnation == (*members_)[rank].incarnation) break;
  }
  return source;
}

void LayoutChannel::CopyAverage(std::size_t index, std::uint32_t rank, DeferredActions* actions) {
  if (step_.phase() != Phase::kRunning) return;
  const RankSession from = AverageSource(index);
  const RankSession to = members_->SessionOf(rank);
  const RankMemory* const source = agreement_.memory(from);
  const RankMemory* const target = agreement_.memory(to);
  if (source == nullptr || target == nullptr) return;
  of_step_.copies.push_back(std::make_unique<AverageCopy>());
  AverageCopy* const copy = of_step_.copies.back().get();
  copy->bucket = index;
  copy->to = to;
  copy->from = from;
  const std::uint64_t offset = plan_.buckets[index].offset;
  std::byte* const data = target->data + offset;
  const ReduceOperation& reduction = reductions_[index];
  copy->check.dtype = reduction.dtype;
  copy->check.count = reduction.count;
  copy->check.user = reduction.user;
  copy->check.flow = reduction.flow;
  copy->check.measure = reduction.measure;
  copy->check.SetBuffers({data});
  copy->check.host().measured_of = reductions_[index].host().buffers.size();
  copy->check.done = [this, copy](const ReduceTimes&) { copied_(this, copy); };
  step_.CopyBegun();
  Pieces pieces([this, copy] { copied_(this, copy); });
  pieces.AddCopy(data, source->data + offset, copy->check.count * ItemSize(copy->check.dtype));
  pieces.Begin(actions);
}

absl::Status LayoutChannel::Copied(AverageCopy* copy, std::uint64_t now_ns,
                                   DeferredActions* actions) {
  const bool running = step_.phase() == Phase::kRunning;
  if (running && copy->check.measure && copy->state == AverageCopy::State::kCopying) {
    copy->state = AverageCopy::State::kMeasuring;
    actions->reductions.push_back(&copy->check);
    return absl::OkStatus();
  }
  copy->state = AverageCopy::State::kDone;
  step_.CopyDone();
  if (running && copy->check.measure &&
      !Equal(copy->check.stats, reductions_[copy->bucket].stats)) {
    return report().Breach(
        absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, copy->from.rank, step(),
        copy->bucket,
        "this rank has changed the bucket's average before the step was complete, and another rank "
        "needs it after a loss. Do not write to gradients between WaitBucket and WaitStep");
  }
  const RankMemory* const memory = agreement_.memory(copy->to);
  // If the session was lost meanwhile, the rank's next session has no average yet.
  const bool present = copy->to == members_->SessionOf(copy->to.rank);
  if (running && present && memory != nullptr && memory->semaphores != nullptr) {
    memory->semaphores->SignalDone(copy->bucket, step());
    TellBucketDone(copy->bucket, copy->to.rank, actions);
  }
  ReleaseLostMemory(actions);
  MaybeFinish(now_ns, actions);
  return absl::OkStatus();
}

// ---- The end of a step --------------------------------------------------------------------------

void LayoutChannel::Void(absl::Status why, std::uint64_t now_ns, DeferredActions* actions) {
  step_.Void(std::move(why));
  GiveUp(actions);
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::GiveUp(DeferredActions* actions) {
  if (!spec().on_gpu || step_.in_flight() == 0) return;
  if (auto given_up = reductions_.GiveUp(step())) actions->given_up.push_back(*std::move(given_up));
}

bool LayoutChannel::MaybeSeenComplete() const {
  return spec().on_gpu && step_.begun() && step_.AllReduced() &&
         of_step_.gpu_verdict.state() != GpuVerdict::State::kVoid;
}

bool LayoutChannel::SeenComplete() const {
  return MaybeSeenComplete() && of_step_.gpu_verdict.state() == GpuVerdict::State::kGood;
}

void LayoutChannel::FinishSeen(std::uint64_t now_ns, DeferredActions* actions) {
  if (!MaybeSeenComplete()) return;
  Finish(SeenComplete() ? absl::OkStatus() : report().InDoubt(of_step_.gpu_verdict.doubt()), now_ns,
         actions);
}

void LayoutChannel::MaybeFinish(std::uint64_t now_ns, DeferredActions* actions) {
  if (!step_.begun() || step_.phase() == Phase::kCut || in_flight() > 0) return;
  if (of_step_.gpu_verdict.state() == GpuVerdict::State::kVoid) step_.Void(report().VoidOnGpus());
  // After a step's last launch only the GPUs decide its verdict. If they have completed the step,
  // it can no longer become void: its deadline then only ends the wait for the ranks' EndStep.
  bool wait_for_ranks = true;
  if (step_.phase() == Phase::kVoid && SeenComplete()) {
    step_.Confirm();
    wait_for_ranks = now_ns < step_.deadline_ns();
  }
  if (step_.phase() == Phase::kRunning) {
    if (!step_.AllReduced()) return;
    if (wait_for_ranks && AnyOwesEnd()) return;
  } else if (SignalLater(actions)) {
    return;
  }
  Finish(step_.why_void(), now_ns, actions);
  early_.HandleAll(*members_, now_ns, actions);
  for (std::uint32_t rank = 0; AnyHasReleased() && rank < members_->world_size(); ++rank) {
    ReleaseIfUnused(rank, actions);
  }
}

bool LayoutChannel::AnyOwesEnd() {
  return owes_end_.Any(members_->world_size(), [this](std::uint32_t rank) {
    return members_->IsAwaited(rank) && !step_.Ended(rank);
  });
}

bool LayoutChannel::SignalLater(DeferredActions* actions) {
  const std::size_t buckets = plan_.buckets.size();
  if (buckets * members_->world_size() <= terms_.signalled_at_once) return false;
  Pieces pieces([this] { signalled_(this); });
  bool any = !of_step_.signals.begun;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const RankMemory* const memory = agreement_.memory(rank);
    if (memory == nullptr || memory->semaphores == nullptr) continue;
    // After a loss a rank may map other memory while the words are written.
    const std::shared_ptr<SemaphorePage>& page = memory->semaphores;
    if (std::find(of_step_.signals.pages.begin(), of_step_.signals.pages.end(), page) !=
        of_step_.signals.pages.end()) {
      continue;
    }
    any = true;
    of_step_.signals.pages.push_back(page);
    for (std::size_t begin = 0; begin < buckets; begin += kSignalsPerTurn) {
      pieces.Add([page, step = step(), begin, end = std::min(buckets, begin + kSignalsPerTurn)] {
        page->DeclareVoid(step);
        for (std::size_t i = begin; i < end; ++i) page->SignalDone(i, step);
      });
    }
  }
  if (!any) return false;
  of_step_.signals.begun = of_step_.signals.under_way = true;
  pieces.Begin(actions);
  return true;
}

void LayoutChannel::Signalled(std::uint64_t now_ns, DeferredActions* actions) {
  of_step_.signals.under_way = false;
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::SignalNow() {
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const RankMemory* const memory = agreement_.memory(rank);
    if (memory == nullptr || memory->semaphores == nullptr) continue;
    const auto& pages = of_step_.signals.pages;
    if (std::find(pages.begin(), pages.end(), memory->semaphores) != pages.end()) continue;
    memory->semaphores->DeclareVoid(step());
    for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
      memory->semaphores->SignalDone(i, step());
    }
  }
}

void LayoutChannel::Finish(absl::Status verdict, std::uint64_t now_ns, DeferredActions* actions) {
  auto record = std::make_shared<StepRecord>();
  record->verdict = std::move(verdict);
  const bool complete = record->verdict.ok();
  record->times.step = step();
  record->times.complete = complete;
  record->times.commit_ns = now_ns;
  record->times.buckets = step_.TakeTimes();
  record->live_ranks = RanksOfStep();
  record->divisor = terms_.options.divide_by_world ? members_->world_size() : record->live_ranks;
  if (complete) record->used_map = step_.used_map().Union(record->live_ranks);
  stats_.RecordStep(complete, step_.last_ready_ns(), now_ns);
  if (complete) {
    double sum_of_squares = 0;
    std::uint64_t non_finite = 0;
    record->stats = reductions_.Stats();
    for (const GradientStats& stats : record->stats) {
      sum_of_squares += stats.sum_of_squares;
      non_finite += stats.non_finite;
    }
    stats_.RecordStats(sum_of_squares, non_finite);
  }
  timeline_->Append(record->times);

  // A void step uses up its number. Its done words end the ranks' waits, and the waiters see that
  // the step is void.
  if (!complete) SignalNow();
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (step_.Ended(rank)) last_ended_[rank] = step();
    const bool began_later = first_step_[rank] > step();
    if (complete && step_.Ended(rank) && !began_later) {
      members_->Stepped(rank, of_step_.last_operation);
    }
    // A rank that was lost after the GPUs had completed the step gets the verdict before its
    // session's end.
    const bool tell = members_->IsAwaited(rank) || (*members_)[rank].state == RankState::kLost;
    if (tell && !began_later) members_->Send(rank, StepDoneMessage{channel(), record}, actions);
  }
  can_replace_ranks_ = can_replace_ranks_ || complete;
  ReleaseStep(actions);
  of_step_ = StepState();
  step_ = NewStep(step() + 1);
  // No bucket is bound to it: losses and reductions have seen to that.
  agreement_.ReleaseLostMemory([](RankSession) { return false; }, actions);
}

void LayoutChannel::ReleaseStep(DeferredActions* actions) {
  for (auto& page : of_step_.signals.pages) actions->releases.push_back(std::move(page));
  // Later: the last copy may have called this.
  for (auto& copy : of_step_.copies) actions->releases.push_back(std::move(copy));
  of_step_.signals = Signals();
  of_step_.copies.clear();
}

std::uint32_t LayoutChannel::RanksOfStep() const {
  // Some of these ranks may have been lost since then.
  if (SeenComplete() && !plan_.buckets.empty()) {
    return static_cast<std::uint32_t>(reductions_[0].ranks.size());
  }
  return members_->StepRanks();
}

// ---- Membership ---------------------------------------------------------------------------------

void LayoutChannel::RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns,
                             DeferredActions* actions) {
  // No bucket can be in flight: each would have needed this rank's mark in the running step.
  reductions_.Rebind();
  if (exited) {
    early_.Drop(rank);
    agreement_.ReleaseMemory(rank, actions);
  }
  if (members_->StepRanks() == 0 || !step_.begun()) return;
  for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (step_.ReadyRanks(i) == members_->StepRanks()) Launch(i, actions);
  }
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::RankLost(std::uint32_t rank, std::uint64_t now_ns, DeferredActions* actions) {
  // A process that ends by an error may release its layouts before its session ends. Its
  // replacement needs them.
  if (released_[rank] && now_ns < released_ns_[rank] + kReleasePatienceNs) {
    released_[rank] = false;
    --released_ranks_;
    reductions_.Rebind();  // its memory was released
  }
  if (!step_.Ended(rank)) step_.Suspend(now_ns);
  step_.Lose(rank);
  first_step_[rank] = kNoStep;
  agreement_.Lose(rank, actions);
  // Otherwise a rank that is lost again and again would leave copies until the step is decided.
  auto& copies = of_step_.copies;
  copies.erase(
      std::remove_if(copies.begin(), copies.end(),
                     [](const auto& copy) { return copy->state == AverageCopy::State::kDone; }),
      copies.end());
  ReleaseLostMemory(actions);
}

void LayoutChannel::ReleaseLostMemory(DeferredActions* actions) {
  if (!agreement_.HasLost()) return;
  std::vector<RankSession> sources;
  for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (step_.Reduced(i)) sources.push_back(AverageSource(i));
  }
  agreement_.ReleaseLostMemory(
      [&](RankSession session) {
        return Touches(session) ||
               std::find(sources.begin(), sources.end(), session) != sources.end();
      },
      actions);
  // Buckets that were bound before must not refer to this memory in the next step.
  reductions_.Rebind();
}

bool LayoutChannel::Touches(RankSession session) const {
  if (step_.HasGradientsOf(session)) return true;
  return std::any_of(of_step_.copies.begin(), of_step_.copies.end(), [session](const auto& copy) {
    return (copy->state != AverageCopy::State::kDone && copy->to == session) ||
           (copy->state == AverageCopy::State::kCopying && copy->from == session);
  });
}

bool LayoutChannel::OwesNothing(std::uint32_t rank) const {
  if (released_[rank]) return !step_.Has(rank);
  // Without memory it has no first step.
  return first_step_[rank] <= step() && !HasGradientsOfEarlier(rank);
}

void LayoutChannel::RankRejoined(std::uint32_t rank, DeferredActions* actions) {
  first_step_[rank] = step() + (step_.Ended(rank) ? 1 : 0);
  members_->Send(rank, LayoutReadyMessage{channel(), plan_.fingerprint, first_step_[rank]},
                 actions);
}

bool LayoutChannel::IsFrozenFor(std::uint32_t rank, std::uint32_t replacement) const {
  return HasBegunFor(rank, replacement) && step_.Ended(rank);
}

bool LayoutChannel::HasBegunFor(std::uint32_t rank, std::uint32_t replacement) const {
  // If a lost session of `replacement` has ended the step, the next step is its first one.
  return step_.phase() == Phase::kRunning && step_.Has(rank) && !step_.Ended(replacement);
}

bool LayoutChannel::RankWaits() const {
  if (!members_->AnyIsRecovering()) return false;
  bool waits = false, lacks = false;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    waits = waits || (members_->MayMark(rank) && step_.Has(rank));
    const RankState state = (*members_)[rank].state;
    const bool waited_for =
        IsMissing(state) || (state == RankState::kHealing && first_step_[rank] == kNoStep);
    lacks = lacks || (waited_for && !step_.Ended(rank));
  }
  return waits && lacks;
}

void LayoutChannel::RankResumed(std::uint32_t rank) {
  reductions_.Rebind();
  // LeaveDone gives the rank the next step's number, so no message about an older step is in
  // flight.
  last_ended_[rank] = step() - 1;
}

void LayoutChannel::AddMissedWords(std::uint32_t rank,
                                   std::vector<std::function<void()>>* pieces) const {
  const RankMemory* const memory = agreement_.memory(rank);
  const std::uint64_t last = step() - 1;
  if (memory == nullptr || memory->semaphores == nullptr || last == 0) return;
  const std::size_t buckets = plan_.buckets.size();
  for (std::size_t begin = 0; begin < buckets; begin += kSignalsPerTurn) {
    const std::size_t end = std::min(buckets, begin + kSignalsPerTurn);
    pieces->push_back([page = memory->semaphores, begin, end, last] {
      for (std::size_t i = begin; i < end; ++i) page->SignalDone(i, last);
    });
  }
}

void LayoutChannel::ReleaseMemory(DeferredActions* actions) {
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    early_.Drop(rank);
    agreement_.ReleaseMemory(rank, actions);
  }
  agreement_.ReleaseLostMemory([](RankSession) { return false; }, actions);
  ReleaseStep(actions);
}

void LayoutChannel::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  agreement_.Tick(now_ns, actions);
  if (step_.phase() != Phase::kRunning) return;
  if (step_.suspended()) return TellLate(now_ns, actions);
  const std::optional<std::uint32_t> in_vain = AwaitedInVain();
  if (in_vain.has_value() && now_ns >= std::min(patience_ends_ns_, step_.deadline_ns())) {
    Void(report().Released(*in_vain), now_ns, actions);
  } else if (now_ns >= step_.deadline_ns()) {
    Void(report().TimedOut(), now_ns, actions);
  } else {
    TellLate(now_ns, actions);
  }
}

void LayoutChannel::TellLate(std::uint64_t now_ns, DeferredActions* actions) {
  bool waits = false;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    waits = waits || (members_->IsAwaited(rank) && step_.Ended(rank));
  }
  if (!waits || !late_notice_.Due(now_ns, step())) return;
  std::vector<std::uint32_t> waiting;
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (members_->IsAwaited(rank) && step_.Ended(rank)) waiting.push_back(rank);
  }
  late_notice_.Tell(now_ns, absl::StrCat("step ", step(), " of layout '", name(), "'"),
                    report().Late(), waiting, members_, actions);
}

}  // namespace gradsync::daemon
