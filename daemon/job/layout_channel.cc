#include "daemon/job/layout_channel.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

using Phase = RunningStep::Phase;

// The largest number of ranks, and of bucket ranges for each rank, that a message names.
constexpr std::size_t kNamed = 8;

// A number that is unique among all layouts of this daemon, whatever their jobs. Workers of other
// nodes may outlive this daemon process and see the numbers of the next one, so each process begins
// at a random number.
std::uint64_t NextLayout() {
  static std::atomic<std::uint64_t> last{std::uint64_t{std::random_device{}()} << 30};
  return ++last;
}

// "3", "3-7", "0-1, 4" of the positions that hold `value`.
std::string Ranges(const std::vector<bool>& flags, bool value) {
  std::vector<std::string> ranges;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != value) continue;
    std::size_t last = i;
    while (last + 1 < flags.size() && flags[last + 1] == value) ++last;
    if (ranges.size() == kNamed) {
      ranges.push_back("...");
      break;
    }
    ranges.push_back(i == last ? absl::StrCat(i) : absl::StrCat(i, "-", last));
    i = last;
  }
  return absl::StrJoin(ranges, ", ");
}

std::optional<std::size_t> FirstOf(const std::vector<bool>& flags, bool value) {
  const auto first = std::find(flags.begin(), flags.end(), value);
  if (first == flags.end()) return std::nullopt;
  return static_cast<std::size_t>(first - flags.begin());
}

}  // namespace

LayoutChannel::LayoutChannel(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                             std::uint32_t first_rank, LayoutPlan plan, const JobTerms& terms,
                             Membership* members, OnReduced reduced)
    : plan_(std::move(plan)),
      terms_(terms),
      members_(members),
      reduced_(std::move(reduced)),
      agreement_(channel, std::move(spec), replaces, first_rank, terms, members),
      step_(NewStep(1)),
      early_(members->world_size()),
      last_ended_(members->world_size()),
      stats_(members->world_size()),
      timeline_(std::make_unique<StepTimeline>(plan_.buckets.size(), members->world_size())) {
  const std::uint64_t layout = NextLayout();
  for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
    auto bucket = std::make_unique<Bucket>();
    ReduceOperation& operation = bucket->operation;
    operation.dtype = plan_.buckets[i].dtype;
    operation.count = plan_.buckets[i].count;
    operation.flow = terms.flow;
    operation.measure = true;
    operation.channel = channel;
    operation.bucket = static_cast<std::uint32_t>(i);
    if (this->spec().on_gpu) {
      auto& device = operation.work.emplace<DeviceReduction>();
      device.layout = layout;
      device.offset = plan_.buckets[i].offset;
      device.nccl = terms.nccl;
      device.step_buckets = static_cast<std::uint32_t>(plan_.buckets.size());
    }
    operation.done = [this, raw = bucket.get(), i](const ReduceTimes& times) {
      // Signals before taking the lock, because trainers wait for this.
      if (raw->operation.failure.ok()) {
        for (SemaphorePage* semaphores : raw->semaphores) {
          // The GPU has already written the words.
          if (this->spec().on_gpu) {
            semaphores->WakeDone(i);
          } else {
            semaphores->SignalDone(i, raw->operation.number);
          }
        }
      }
      reduced_(this, i, times, raw->operation.failure);
    };
    buckets_.push_back(std::move(bucket));
  }
}

RunningStep LayoutChannel::NewStep(std::uint64_t number) const {
  return RunningStep(number, plan_.buckets.size(), members_->world_size(),
                     spec().parameters.size());
}

void LayoutChannel::Begin(LayoutChannel* replaced, DeferredActions* actions) {
  if (replaced != nullptr) {
    step_ = NewStep(replaced->step());
    stats_ = std::move(replaced->stats_);
    if (buckets_.size() == replaced->buckets_.size()) std::swap(timeline_, replaced->timeline_);
    std::fill(last_ended_.begin(), last_ended_.end(), step() - 1);
  }
  agreement_.Reach(plan_.fingerprint, step(), actions);
}

// ---- Messages of ranks --------------------------------------------------------------------------

absl::StatusOr<LayoutChannel::Admission> LayoutChannel::Admit(std::uint32_t rank,
                                                              std::uint64_t step,
                                                              absl::string_view what) const {
  if (!agreement_.reached()) {
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kArenaNotPopulated, rank, step,
                  std::nullopt, absl::StrCat(what, " before LayoutReady"));
  }
  const std::uint64_t current = step_.number();
  const bool ended = step_.Ended(rank);
  if (step < current && step > last_ended_[rank]) return Admission::kIgnore;
  if (step < current) {
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kStaleStep, rank, step,
                  std::nullopt,
                  absl::StrCat(what, " for a step that is decided; the next one is ", current));
  }
  if (step == current + 1 && spec().on_gpu && ended) return Admission::kEarly;
  if (step > current) {
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank, step,
                  std::nullopt, absl::StrCat(what, " ahead of step ", current));
  }
  if (ended) {
    // The rank may not know yet that the step is void. Otherwise it is a breach.
    if (step_.phase() == Phase::kVoid) return Admission::kIgnore;
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank, step,
                  std::nullopt, absl::StrCat(what, " after this rank's EndStep"));
  }
  return Admission::kAdmit;
}

absl::Status LayoutChannel::Postpone(std::uint32_t rank, std::uint64_t step,
                                     EarlyMessages::Message message) {
  // At most one message for each bucket, and one for the step's end.
  if (early_.Count(rank) > buckets_.size()) {
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank, step,
                  std::nullopt,
                  absl::StrCat("more messages than the step has, before step ", step_.number(),
                               " is decided"));
  }
  early_.Add(rank, std::move(message));
  return absl::OkStatus();
}

void LayoutChannel::StartStep(std::uint64_t now_ns) {
  step_.Begin(now_ns + terms_.step_timeout_ns);
}

void LayoutChannel::Mark(std::uint32_t rank, std::size_t index, std::uint64_t now_ns,
                         DeferredActions* actions) {
  StartStep(now_ns);
  step_.Mark(rank, index, now_ns);
  if (step_.ReadyRanks(index) == members_->StepRanks()) Launch(index, actions);
}

absl::Status LayoutChannel::MarkReady(std::uint32_t rank, std::uint64_t step,
                                      absl::Span<const std::uint32_t> buckets, std::uint64_t now_ns,
                                      DeferredActions* actions) {
  const auto admission = Admit(rank, step, "BucketReady");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kIgnore) return absl::OkStatus();
  if (*admission == Admission::kEarly) {
    if (early_.CountMarks(rank, buckets.size()) > buckets_.size()) {
      return Breach(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, rank, step,
                    std::nullopt, "more marks than the layout has buckets");
    }
    return Postpone(
        rank, step,
        [this, rank, step, kept = std::vector<std::uint32_t>(buckets.begin(), buckets.end())](
            std::uint64_t then_ns, DeferredActions* then) {
          return MarkReady(rank, step, kept, then_ns, then);
        });
  }
  for (const std::uint32_t index : buckets) {
    if (index >= buckets_.size()) {
      return Breach(absl::StatusCode::kInvalidArgument, reason::kUnknownBucket, rank, step, index,
                    absl::StrCat("there is no such bucket; the layout has ", buckets_.size()));
    }
    if (step_.Marked(rank, index)) {
      return Breach(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, rank, step, index,
                    "marked ready a second time in this step");
    }
    Mark(rank, index, now_ns, actions);
  }
  return absl::OkStatus();
}

absl::Status LayoutChannel::EndStep(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view used_map, std::uint64_t now_ns,
                                    DeferredActions* actions) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  UsedMap& used = step_.used_map();
  if (*admission == Admission::kEarly) {
    if (used_map.size() > used.bytes()) return MalformedMap(rank, step, used_map);
    return Postpone(rank, step,
                    [this, rank, step, kept = std::string(used_map)](std::uint64_t then_ns,
                                                                     DeferredActions* then) {
                      return EndStep(rank, step, kept, then_ns, then);
                    });
  }
  if (*admission == Admission::kIgnore) {
    last_ended_[rank] = std::max(last_ended_[rank], step);
    return absl::OkStatus();
  }
  if (const auto unmarked = step_.FirstUnmarked(rank)) {
    return Breach(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, rank, step,
                  *unmarked, "EndStep, but this bucket was not marked ready");
  }
  if (!used_map.empty() && used_map.size() != used.bytes()) {
    return MalformedMap(rank, step, used_map);
  }
  StartStep(now_ns);
  used.Add(used_map);
  step_.End(rank);
  MaybeFinish(now_ns, actions);
  return absl::OkStatus();
}

absl::Status LayoutChannel::FinishStep(std::uint32_t rank, std::uint64_t step,
                                       absl::string_view used_map, std::uint64_t now_ns,
                                       DeferredActions* actions) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kEarly) {
    if (used_map.size() > step_.used_map().bytes()) return MalformedMap(rank, step, used_map);
    return Postpone(rank, step,
                    [this, rank, step, kept = std::string(used_map)](std::uint64_t then_ns,
                                                                     DeferredActions* then) {
                      return FinishStep(rank, step, kept, then_ns, then);
                    });
  }
  if (*admission == Admission::kAdmit) {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      if (!step_.Marked(rank, i)) Mark(rank, i, now_ns, actions);
    }
  }
  return EndStep(rank, step, used_map, now_ns, actions);
}

absl::Status LayoutChannel::Abandon(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view reason, std::uint64_t now_ns,
                                    DeferredActions* actions) {
  const auto admission = Admit(rank, step, "AbandonStep");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kEarly) {
    return Postpone(rank, step,
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
  Void(Breach(absl::StatusCode::kAborted, reason::kStepAbandoned, rank, step, unmarked,
              absl::StrCat("abandoned by this rank: ", reason,
                           ". The step is void on every rank; redo it under the next number.")),
       now_ns, actions);
  return absl::OkStatus();
}

// ---- Reductions ---------------------------------------------------------------------------------

void LayoutChannel::BindMemory() {
  const double scale = spec().average ? 1.0 / Divisor() : 1.0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    // No bucket is in flight here; RankLeft says why.
    Bucket& bucket = *buckets_[i];
    bucket.operation.scale = scale;
    bucket.operation.ranks.clear();
    bucket.semaphores.clear();
    if (spec().on_gpu) bucket.operation.device().arenas.clear();
    HostBuffers buffers;
    for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
      if (!members_->InSteps(rank)) continue;
      const RankMemory& memory = *agreement_.memory(rank);
      bucket.operation.ranks.push_back(rank);
      if (memory.semaphores != nullptr) bucket.semaphores.push_back(memory.semaphores.get());
      if (spec().on_gpu) {
        bucket.operation.device().arenas.push_back(memory.gpu.get());
      } else {
        buffers.push_back(memory.data == nullptr ? nullptr : memory.data + plan_.buckets[i].offset);
      }
    }
    if (!spec().on_gpu) bucket.operation.SetBuffers(buffers);
  }
  rebind_ = false;
}

void LayoutChannel::Launch(std::size_t index, DeferredActions* actions) {
  if (!step_.Waiting(index) || step_.phase() != Phase::kRunning) return;
  if (rebind_) BindMemory();
  step_.Submitted(index);
  ReduceOperation& operation = buckets_[index]->operation;
  operation.number = step();
  operation.failure = absl::OkStatus();
  if (spec().on_gpu) {
    operation.device().is_void = false;
    operation.device().verdict_offset = plan_.VerdictOffset(step());
  }
  actions->reductions.push_back(&operation);
}

void LayoutChannel::Reduced(std::size_t index, const ReduceTimes& times, std::uint64_t now_ns,
                            DeferredActions* actions) {
  const ReduceOperation& operation = buckets_[index]->operation;
  step_.Done(index, times);
  if (spec().on_gpu) gpu_verdict_.Add(operation);
  if (step_.phase() == Phase::kCut) return;
  stats_.RecordBucket(step_.Times(index).ready_ns, times.start_ns, times.finish_ns,
                      operation.count * ItemSize(operation.dtype));
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    if (!members_->InSteps(rank) || !agreement_.bucket_done_messages(rank)) continue;
    members_->Send(rank,
                   BucketDoneMessage{channel(), step(), static_cast<std::uint32_t>(index),
                                     times.start_ns, times.finish_ns},
                   actions);
  }
  MaybeFinish(now_ns, actions);
}

// ---- The end of a step --------------------------------------------------------------------------

void LayoutChannel::Void(absl::Status why, std::uint64_t now_ns, DeferredActions* actions) {
  step_.Void(std::move(why));
  GiveUp(actions);
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::GiveUp(DeferredActions* actions) {
  if (!spec().on_gpu || step_.in_flight() == 0 || !gpu_verdict_.GiveUp()) return;
  GivenUpStep given_up{buckets_.front()->operation.device().layout, step(), {}};
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    const RankMemory* const memory = agreement_.memory(rank);
    if (memory != nullptr) given_up.arenas.push_back(memory->gpu);
  }
  actions->given_up.push_back(std::move(given_up));
}

bool LayoutChannel::MaybeSeenComplete() const {
  return spec().on_gpu && step_.begun() && step_.AllReduced() &&
         gpu_verdict_.state() != GpuVerdict::State::kVoid;
}

bool LayoutChannel::SeenComplete() const {
  return MaybeSeenComplete() && gpu_verdict_.state() == GpuVerdict::State::kGood;
}

void LayoutChannel::FinishSeen(std::uint64_t now_ns, DeferredActions* actions) {
  if (!MaybeSeenComplete()) return;
  Finish(SeenComplete() ? absl::OkStatus() : InDoubt(), now_ns, actions);
}

void LayoutChannel::MaybeFinish(std::uint64_t now_ns, DeferredActions* actions) {
  if (!step_.begun() || step_.phase() == Phase::kCut || step_.in_flight() > 0) return;
  if (gpu_verdict_.state() == GpuVerdict::State::kVoid) step_.Void(VoidOnGpus());
  // After a step's last launch only the GPUs decide its verdict. If they have completed the step,
  // it can no longer become void: its deadline then only ends the wait for the ranks' EndStep.
  bool wait_for_ranks = true;
  if (step_.phase() == Phase::kVoid && SeenComplete()) {
    step_.Confirm();
    wait_for_ranks = now_ns < step_.deadline_ns();
  }
  if (step_.phase() == Phase::kRunning) {
    if (!step_.AllReduced()) return;
    for (std::uint32_t rank = 0; wait_for_ranks && rank < members_->world_size(); ++rank) {
      if (members_->InSteps(rank) && !step_.Ended(rank)) return;
    }
  }
  Finish(step_.why_void(), now_ns, actions);
  early_.HandleAll(now_ns, actions);
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
  record->divisor = terms_.divide_by_world ? members_->world_size() : record->live_ranks;
  if (complete) record->used_map = step_.used_map().Union(record->live_ranks);
  stats_.RecordStep(complete, step_.last_ready_ns(), now_ns);
  if (complete) {
    double sum_of_squares = 0;
    std::uint64_t non_finite = 0;
    for (const auto& bucket : buckets_) {
      const GradientStats& stats = bucket->operation.stats;
      record->stats.push_back(stats);
      sum_of_squares += stats.sum_of_squares;
      non_finite += stats.non_finite;
    }
    stats_.RecordNumbers(sum_of_squares, non_finite);
  }
  timeline_->Append(record->times);

  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    SemaphorePage* const semaphores = agreement_.semaphores(rank);
    if (!complete && semaphores != nullptr) {
      // A void step uses up its number. SignalDone ends the rank's waits, and the waiters see that
      // the step is void.
      semaphores->DeclareVoid(step());
      for (std::size_t i = 0; i < buckets_.size(); ++i) semaphores->SignalDone(i, step());
    }
    if (step_.Ended(rank)) last_ended_[rank] = step();
    // A rank that was lost after the GPUs had completed the step gets the verdict before its
    // session's end.
    const bool tell = members_->InSteps(rank) || (*members_)[rank].state == RankState::kLost;
    if (tell) members_->Send(rank, StepDoneMessage{channel(), record}, actions);
  }
  step_ = NewStep(step() + 1);
  gpu_verdict_ = GpuVerdict();
}

std::uint32_t LayoutChannel::RanksOfStep() const {
  // Some of these ranks may have been lost since then.
  if (SeenComplete() && !buckets_.empty()) {
    return static_cast<std::uint32_t>(buckets_.front()->operation.ranks.size());
  }
  return members_->StepRanks();
}

std::uint32_t LayoutChannel::Divisor() const {
  return terms_.divide_by_world ? members_->world_size() : members_->StepRanks();
}

// ---- Membership ---------------------------------------------------------------------------------

void LayoutChannel::RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns,
                             DeferredActions* actions) {
  // No bucket can be in flight: each would have needed this rank's mark in the running step.
  rebind_ = true;
  if (exited) {
    early_.Drop(rank);
    agreement_.Release(rank, actions);
  }
  if (members_->StepRanks() == 0 || !step_.begun()) return;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (step_.ReadyRanks(i) == members_->StepRanks()) Launch(i, actions);
  }
  MaybeFinish(now_ns, actions);
}

void LayoutChannel::RankResumed(std::uint32_t rank) {
  rebind_ = true;
  // LeaveDone gives the rank the next step's number, so no message about an older step is in
  // flight.
  last_ended_[rank] = step() - 1;
  SemaphorePage* const semaphores = agreement_.semaphores(rank);
  if (semaphores == nullptr) return;
  for (std::size_t i = 0; i < buckets_.size(); ++i) semaphores->SignalDone(i, step() - 1);
}

void LayoutChannel::ReleaseMemory(DeferredActions* actions) {
  for (std::uint32_t rank = 0; rank < members_->world_size(); ++rank) {
    early_.Drop(rank);
    agreement_.Release(rank, actions);
  }
}

void LayoutChannel::Tick(std::uint64_t now_ns, DeferredActions* actions) {
  agreement_.Tick(now_ns, actions);
  if (step_.phase() == Phase::kRunning && now_ns >= step_.deadline_ns()) {
    Void(TimedOut(), now_ns, actions);
  }
}

// ---- Errors, and what people ask ----------------------------------------------------------------

absl::Status LayoutChannel::Breach(absl::StatusCode code, Reason reason, std::uint32_t rank,
                                   std::uint64_t step, std::optional<std::size_t> bucket,
                                   absl::string_view what) const {
  const std::string index = bucket.has_value() ? absl::StrCat(*bucket) : "";
  return MakeError(code, reason,
                   absl::StrCat("layout '", name(), "', rank ", rank, ", step ", step,
                                index.empty() ? "" : ", bucket ", index, ": ", what),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kChannel, channel()},
                    {field::kStep, step},
                    {field::kBucket, index}});
}

absl::Status LayoutChannel::MalformedMap(std::uint32_t rank, std::uint64_t step,
                                         absl::string_view used_map) const {
  return Breach(absl::StatusCode::kInvalidArgument, reason::kMalformed, rank, step, std::nullopt,
                absl::StrCat("used_map of ", used_map.size(), " bytes, ",
                             (spec().parameters.size() + 7) / 8, " expected"));
}

absl::Status LayoutChannel::VoidOnGpus() const {
  return MakeError(
      absl::StatusCode::kAborted, reason::kStepVoid,
      absl::StrCat("layout '", name(), "', step ", step(),
                   ": the gradients of some rank never came to its GPU. The step is void on every "
                   "rank; redo it under the next number."),
      {{field::kJob, terms_.job_id}, {field::kChannel, channel()}, {field::kStep, step()}});
}

absl::Status LayoutChannel::InDoubt() const {
  return MakeError(
      absl::StatusCode::kAborted, reason::kStepInDoubt,
      absl::StrCat(
          "layout '", name(), "', step ", step(),
          " was lost after its last launch, so that it may be complete on some ranks' GPUs "
          "and void on others': ",
          gpu_verdict_.doubt().message(),
          ". Compare the ranks' last steps, or go on from a checkpoint on every rank."),
      {{field::kJob, terms_.job_id}, {field::kChannel, channel()}, {field::kStep, step()}});
}

absl::Status LayoutChannel::TimedOut() const {
  // The error's fields name the first missing rank, or none if only a reduction is missing. The
  // message names all of them.
  std::string rank, bucket;
  for (std::uint32_t other = 0; rank.empty() && other < members_->world_size(); ++other) {
    if (!members_->InSteps(other)) continue;
    auto index = step_.FirstUnmarked(other);
    if (!index.has_value()) index = FirstOf(NotWritten(other), true);
    if (step_.Ended(other) && !index.has_value()) continue;
    rank = absl::StrCat(other);
    if (index.has_value()) bucket = absl::StrCat(*index);
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kStepTimeout,
                   absl::StrCat("layout '", name(), "', step ", step(),
                                " was not finished within the job's step_timeout: ", Missing(),
                                ". The step is void on every rank: look at those ranks, then redo "
                                "it, or raise step_timeout."),
                   {{field::kJob, terms_.job_id},
                    {field::kRank, rank},
                    {field::kChannel, channel()},
                    {field::kStep, step()},
                    {field::kBucket, bucket}});
}

std::vector<std::uint32_t> LayoutChannel::MissingRanks() const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; running() && rank < members_->world_size(); ++rank) {
    if (members_->InSteps(rank) && !step_.Ended(rank)) missing.push_back(rank);
  }
  return missing;
}

std::string LayoutChannel::Missing() const {
  if (!running()) return "";
  std::vector<std::string> missing;
  for (const std::uint32_t rank : MissingRanks()) {
    if (missing.size() == kNamed) {
      missing.push_back("...");
      break;
    }
    if (FirstUnmarked(rank).has_value()) {
      missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has not marked bucket ",
                                     Ranges(step_.Marks(rank), false), " ready"));
    } else {
      missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has not ended the step"));
    }
  }
  for (std::uint32_t rank = 0; rank < members_->world_size() && missing.size() < kNamed; ++rank) {
    const std::vector<bool> not_written = NotWritten(rank);
    if (!FirstOf(not_written, true).has_value()) continue;
    missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has marked bucket ",
                                   Ranges(not_written, true),
                                   " ready, but its GPU has not written it"));
  }
  if (missing.empty() && in_flight() > 0) missing.push_back("a reduction is running");
  return absl::StrJoin(missing, "; ");
}

std::vector<bool> LayoutChannel::NotWritten(std::uint32_t rank) const {
  const SemaphorePage* const semaphores = agreement_.semaphores(rank);
  if (!spec().on_gpu || semaphores == nullptr) return {};
  std::vector<bool> not_written(buckets_.size());
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    not_written[i] =
        step_.Marked(rank, i) && !step_.Reduced(i) && !semaphores->ReadyShown(i, step());
  }
  return not_written;
}

}  // namespace gradsync::daemon
