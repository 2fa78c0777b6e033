#include "daemon/job/layout_channel.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"

namespace gradsync {
namespace {

// How many ranks, and ranges of buckets of each, a message names at most.
constexpr std::size_t kNamed = 8;

// Numbers layouts over all of the daemon's jobs and their generations. Workers of other nodes hear
// these numbers too, from one coordinator's life after the other: so each begins somewhere else.
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
    : channel_(channel),
      spec_(std::move(spec)),
      replaces_(replaces),
      first_rank_(first_rank),
      plan_(std::move(plan)),
      terms_(terms),
      members_(members),
      reduced_(std::move(reduced)),
      ranks_(members->world_size()),
      stats_(members->world_size()),
      timeline_(std::make_unique<StepTimeline>(plan_.buckets.size(), members->world_size())) {
  for (RankLayout& rank : ranks_) rank.marked.resize(plan_.buckets.size());
  const std::uint64_t layout = NextLayout();
  for (std::size_t i = 0; i < plan_.buckets.size(); ++i) {
    auto bucket = std::make_unique<Bucket>();
    bucket->times.ready_ns.resize(members->world_size());
    bucket->operation.dtype = plan_.buckets[i].dtype;
    bucket->operation.count = plan_.buckets[i].count;
    bucket->operation.flow = terms.flow;
    bucket->operation.measure = true;
    bucket->operation.channel = channel_;
    bucket->operation.bucket = static_cast<std::uint32_t>(i);
    bucket->operation.gpu.layout = layout;
    bucket->operation.gpu.offset = plan_.buckets[i].offset;
    bucket->operation.gpu.nccl = terms.nccl;
    bucket->operation.gpu.step_buckets = static_cast<std::uint32_t>(plan_.buckets.size());
    bucket->operation.done = [this, raw = bucket.get(), i](const ReduceTimes& times) {
      // Before the lock: the trainers' waits end here.
      if (raw->operation.failure.ok()) {
        for (SemaphorePage* semaphores : raw->semaphores) {
          // A GPU has written its words itself.
          if (spec_.on_gpu) {
            semaphores->WakeDone(i);
          } else {
            semaphores->SignalDone(i, raw->step);
          }
        }
      }
      reduced_(this, i, times, raw->operation.failure);
    };
    buckets_.push_back(std::move(bucket));
  }
}

// ---- Agreement
// -----------------------------------------------------------------------------------

absl::Status LayoutChannel::Register(std::uint32_t rank, LayoutRequest request, Effects* effects) {
  if (!agreement_.ok()) return agreement_;
  if (ranks_[rank].registered) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "ALREADY_REGISTERED",
                     absl::StrCat("rank ", rank, " has registered layout '", name(), "' already"));
  }
  std::string difference = FirstDifference(spec_, first_rank_, request.spec, rank);
  if (request.replaces != replaces_) {
    const auto replaced = [](std::uint32_t channel) {
      return channel == 0 ? std::string("no layout") : absl::StrCat("that of channel ", channel);
    };
    difference = absl::StrCat("replaces ", replaced(replaces_), " on rank ", first_rank_, ", ",
                              replaced(request.replaces), " on rank ", rank);
  }
  if (!difference.empty()) {
    ranks_[rank].refused = true;
    FailAgreement(
        MakeError(
            absl::StatusCode::kFailedPrecondition, "LAYOUT_MISMATCH",
            absl::StrCat("layout '", name(), "' differs between ranks ",
                         members_->Name(first_rank_), " and ", members_->Name(rank), ": ",
                         difference, ". Build the same model, in the same order, on every rank."),
            {{"job", terms_.job_id},
             {"rank", absl::StrCat(rank)},
             {"other_rank", absl::StrCat(first_rank_)},
             {"channel", absl::StrCat(channel_)}}),
        effects);
    return agreement_;
  }
  ranks_[rank].registered = true;
  request.spec = LayoutSpec{};
  ranks_[rank].request = std::move(request);
  return absl::OkStatus();
}

void LayoutChannel::Refuse(std::uint32_t rank, const absl::Status& why, Effects* effects) {
  if (ready_ || !agreement_.ok()) return;
  // It is told by the answer to its own request.
  ranks_[rank].registered = false;
  ranks_[rank].refused = true;
  FailAgreement(MakeError(why.code(), "LAYOUT_REFUSED",
                          absl::StrCat("layout '", name(), "' was refused to rank ", rank, ": ",
                                       why.message()),
                          {{"job", terms_.job_id},
                           {"rank", absl::StrCat(rank)},
                           {"channel", absl::StrCat(channel_)}}),
                effects);
}

void LayoutChannel::Hold(std::uint32_t rank, std::shared_ptr<void> memory, Effects* effects) {
  if (dead() || stopped_ || !ranks_[rank].registered) {
    effects->releases.push_back(std::move(memory));
  } else {
    ranks_[rank].held = std::move(memory);
  }
}

absl::Status LayoutChannel::Mapped(std::uint32_t rank, RankMemory memory) {
  if (!agreement_.ok() || stopped_) return absl::OkStatus();  // it has been told
  if (!ranks_[rank].registered || ranks_[rank].memory.has_value()) {
    return Breach(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step_,
                  std::nullopt, "ArenaMapped without a registration, or twice");
  }
  const std::string device = memory.gpu != nullptr ? memory.gpu->key().device : "";
  if (device != ranks_[rank].request.device) {
    return Breach(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step_,
                  std::nullopt, "ArenaMapped of memory elsewhere than it was asked for");
  }
  ranks_[rank].memory = std::move(memory);
  return absl::OkStatus();
}

bool LayoutChannel::Complete() const {
  if (!agreement_.ok() || members_->StepRanks() == 0) return false;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (members_->InSteps(rank) && !ranks_[rank].memory.has_value()) return false;
  }
  return true;
}

void LayoutChannel::Begin(LayoutChannel* replaced, Effects* effects) {
  ready_ = true;
  if (replaced != nullptr) {
    step_ = replaced->step_;
    stats_ = std::move(replaced->stats_);
    if (buckets_.size() == replaced->buckets_.size()) std::swap(timeline_, replaced->timeline_);
    for (RankLayout& rank : ranks_) rank.last_ended = step_ - 1;
  }
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].memory.has_value()) continue;
    members_->Send(rank, LayoutReadyMessage{channel_, plan_.fingerprint, step_}, effects);
  }
}

void LayoutChannel::FailAgreement(const absl::Status& status, Effects* effects) {
  agreement_ = status;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].registered) continue;
    members_->Send(rank, LayoutFailedMessage{ranks_[rank].request.request_id, status}, effects);
  }
  ReleaseMemory(effects);  // no step has begun
}

// ---- Steps
// ---------------------------------------------------------------------------------------

absl::Status LayoutChannel::Breach(absl::StatusCode code, absl::string_view reason,
                                   std::uint32_t rank, std::uint64_t step,
                                   std::optional<std::size_t> bucket,
                                   absl::string_view what) const {
  std::string message =
      absl::StrCat("layout '", name(), "', rank ", rank, ", step ", step,
                   bucket.has_value() ? absl::StrCat(", bucket ", *bucket) : "", ": ", what);
  if (bucket.has_value()) {
    return MakeError(code, reason, message,
                     {{"job", terms_.job_id},
                      {"rank", absl::StrCat(rank)},
                      {"channel", absl::StrCat(channel_)},
                      {"step", absl::StrCat(step)},
                      {"bucket", absl::StrCat(*bucket)}});
  }
  return MakeError(code, reason, message,
                   {{"job", terms_.job_id},
                    {"rank", absl::StrCat(rank)},
                    {"channel", absl::StrCat(channel_)},
                    {"step", absl::StrCat(step)}});
}

absl::StatusOr<LayoutChannel::Admission> LayoutChannel::Admit(std::uint32_t rank,
                                                              std::uint64_t step,
                                                              absl::string_view what) const {
  if (!agreement_.ok() || !ready_) {
    return Breach(absl::StatusCode::kFailedPrecondition, "ARENA_NOT_POPULATED", rank, step,
                  std::nullopt, absl::StrCat(what, " before LayoutReady"));
  }
  if (step < step_ && step > ranks_[rank].last_ended) return Admission::kIgnore;
  if (step < step_) {
    return Breach(absl::StatusCode::kFailedPrecondition, "STALE_STEP", rank, step, std::nullopt,
                  absl::StrCat(what, " for a step that is decided; the next one is ", step_));
  }
  if (step == step_ + 1 && spec_.on_gpu && ranks_[rank].ended) return Admission::kEarly;
  if (step > step_) {
    return Breach(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step,
                  std::nullopt, absl::StrCat(what, " ahead of step ", step_));
  }
  if (ranks_[rank].ended) {
    // A void step that waits for its last reduction: the rank may not know yet. Otherwise a breach.
    if (!void_.ok()) return Admission::kIgnore;
    return Breach(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step,
                  std::nullopt, absl::StrCat(what, " after this rank's EndStep"));
  }
  return Admission::kAdmit;
}

absl::Status LayoutChannel::Postpone(std::uint32_t rank, std::uint64_t step,
                                     RankLayout::Early message) {
  std::vector<RankLayout::Early>& early = ranks_[rank].early;
  // Each bucket once, and the step's end.
  if (early.size() > buckets_.size()) {
    return Breach(
        absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step, std::nullopt,
        absl::StrCat("more messages than the step has, before step ", step_, " is decided"));
  }
  early.push_back(std::move(message));
  return absl::OkStatus();
}

void LayoutChannel::TakeEarly(std::uint64_t now_ns, Effects* effects) {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].early_marks = 0;
    for (const RankLayout::Early& message : std::exchange(ranks_[rank].early, {})) {
      absl::Status status = message(now_ns, effects);
      if (status.ok()) continue;
      effects->breaches.emplace_back(rank, std::move(status));
      break;
    }
  }
}

void LayoutChannel::Start(std::uint64_t now_ns) {
  if (started_) return;
  started_ = true;
  deadline_ns_ = now_ns + terms_.step_timeout_ns;
}

void LayoutChannel::Mark(std::uint32_t rank, std::size_t index, std::uint64_t now_ns,
                         Effects* effects) {
  Start(now_ns);
  ranks_[rank].marked[index] = true;
  ++ranks_[rank].marks;
  Bucket& bucket = *buckets_[index];
  bucket.times.ready_ns[rank] = now_ns;
  ++bucket.ready_ranks;
  last_ready_ns_ = now_ns;
  if (bucket.ready_ranks == members_->StepRanks()) Launch(index, effects);
}

absl::Status LayoutChannel::MarkReady(std::uint32_t rank, std::uint64_t step,
                                      absl::Span<const std::uint32_t> buckets, std::uint64_t now_ns,
                                      Effects* effects) {
  const auto admission = Admit(rank, step, "BucketReady");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kIgnore) return absl::OkStatus();
  if (*admission == Admission::kEarly) {
    ranks_[rank].early_marks += buckets.size();
    if (ranks_[rank].early_marks > buckets_.size()) {
      return Breach(absl::StatusCode::kFailedPrecondition, "ALREADY_READY", rank, step,
                    std::nullopt, "more marks than the layout has buckets");
    }
    return Postpone(
        rank, step,
        [this, rank, step, kept = std::vector<std::uint32_t>(buckets.begin(), buckets.end())](
            std::uint64_t then_ns, Effects* then) {
          return MarkReady(rank, step, kept, then_ns, then);
        });
  }
  const RankLayout& mine = ranks_[rank];
  for (const std::uint32_t index : buckets) {
    if (index >= buckets_.size()) {
      return Breach(absl::StatusCode::kInvalidArgument, "UNKNOWN_BUCKET", rank, step, index,
                    absl::StrCat("there is no such bucket; the layout has ", buckets_.size()));
    }
    if (mine.marked[index]) {
      return Breach(absl::StatusCode::kFailedPrecondition, "ALREADY_READY", rank, step, index,
                    "marked ready a second time in this step");
    }
    Mark(rank, index, now_ns, effects);
  }
  return absl::OkStatus();
}

void LayoutChannel::BindMemory() {
  const double scale = spec_.average ? 1.0 / Divisor() : 1.0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = *buckets_[i];
    if (bucket.state == BucketState::kReducing) continue;  // cannot be: see RankLeft
    bucket.operation.scale = scale;
    bucket.operation.buffers.clear();
    bucket.operation.ranks.clear();
    bucket.operation.between_nodes = false;
    bucket.operation.gpu.arenas.clear();
    bucket.semaphores.clear();
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!members_->InSteps(rank)) continue;
      const RankMemory& memory = *ranks_[rank].memory;
      bucket.operation.ranks.push_back(rank);
      const bool here = memory.semaphores != nullptr;
      if (here) bucket.semaphores.push_back(memory.semaphores.get());
      if (memory.gpu != nullptr) {
        bucket.operation.gpu.arenas.push_back(memory.gpu.get());
      } else if (here) {
        bucket.operation.buffers.push_back(memory.data + plan_.buckets[i].offset);
      } else {
        bucket.operation.buffers.push_back(nullptr);
        bucket.operation.between_nodes = true;
      }
    }
  }
  rebind_ = false;
}

void LayoutChannel::Launch(std::size_t index, Effects* effects) {
  Bucket& bucket = *buckets_[index];
  if (bucket.state != BucketState::kWaiting || stopped_ || !void_.ok()) return;
  if (rebind_) BindMemory();
  bucket.state = BucketState::kReducing;
  bucket.step = step_;
  bucket.operation.number = step_;
  bucket.operation.failure = absl::OkStatus();
  bucket.operation.gpu.is_void = false;
  bucket.operation.gpu.verdict_offset = plan_.VerdictOffset(step_);
  ++in_flight_;
  effects->reductions.push_back(&bucket.operation);
}

void LayoutChannel::Reduced(std::size_t index, const ReduceTimes& times, std::uint64_t now_ns,
                            Effects* effects) {
  Bucket& bucket = *buckets_[index];
  bucket.state = BucketState::kDone;
  bucket.times.start_ns = times.start_ns;
  bucket.times.finish_ns = times.finish_ns;
  ++done_buckets_;
  --in_flight_;
  gpu_void_ = gpu_void_ || bucket.operation.gpu.is_void;
  if (gpu_doubt_.ok()) gpu_doubt_ = bucket.operation.failure;
  if (stopped_) return;
  stats_.RecordBucket(bucket.times.ready_ns, times.start_ns, times.finish_ns,
                      bucket.operation.count * ItemSize(bucket.operation.dtype));
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!members_->InSteps(rank) || !ranks_[rank].request.bucket_done_messages) continue;
    members_->Send(rank,
                   BucketDoneMessage{channel_, step_, static_cast<std::uint32_t>(index),
                                     times.start_ns, times.finish_ns},
                   effects);
  }
  MaybeFinish(now_ns, effects);
}

absl::Status LayoutChannel::MalformedMap(std::uint32_t rank, std::uint64_t step,
                                         absl::string_view used_map) const {
  return Breach(absl::StatusCode::kInvalidArgument, "MALFORMED", rank, step, std::nullopt,
                absl::StrCat("used_map of ", used_map.size(), " bytes, ",
                             (spec_.parameters.size() + 7) / 8, " expected"));
}

absl::Status LayoutChannel::EndStep(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view used_map, std::uint64_t now_ns,
                                    Effects* effects) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  RankLayout& mine = ranks_[rank];
  if (*admission == Admission::kEarly) {
    if (used_map.size() > (spec_.parameters.size() + 7) / 8)
      return MalformedMap(rank, step, used_map);
    return Postpone(
        rank, step,
        [this, rank, step, kept = std::string(used_map)](std::uint64_t then_ns, Effects* then) {
          return EndStep(rank, step, kept, then_ns, then);
        });
  }
  if (*admission == Admission::kIgnore) {
    mine.last_ended = std::max(mine.last_ended, step);
    return absl::OkStatus();
  }
  if (const auto unmarked = FirstUnmarked(rank)) {
    return Breach(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VIOLATION", rank, step,
                  *unmarked, "EndStep, but this bucket was not marked ready");
  }
  const std::size_t map_bytes = (spec_.parameters.size() + 7) / 8;
  if (!used_map.empty() && used_map.size() != map_bytes) {
    return MalformedMap(rank, step, used_map);
  }
  Start(now_ns);
  if (used_map.empty()) {
    used_map_.assign(map_bytes, '\xff');
  } else {
    all_used_ = false;
    used_map_.resize(map_bytes, '\0');
    for (std::size_t i = 0; i < map_bytes; ++i) {
      used_map_[i] = static_cast<char>(used_map_[i] | used_map[i]);
    }
  }
  // No bit for a parameter that there is not.
  if (const std::size_t last_bits = spec_.parameters.size() % 8; last_bits != 0) {
    used_map_.back() = static_cast<char>(used_map_.back() & ((1u << last_bits) - 1));
  }
  ++used_maps_;
  mine.ended = true;
  MaybeFinish(now_ns, effects);
  return absl::OkStatus();
}

absl::Status LayoutChannel::FinishStep(std::uint32_t rank, std::uint64_t step,
                                       absl::string_view used_map, std::uint64_t now_ns,
                                       Effects* effects) {
  const auto admission = Admit(rank, step, "EndStep");
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kEarly) {
    if (used_map.size() > (spec_.parameters.size() + 7) / 8)
      return MalformedMap(rank, step, used_map);
    return Postpone(
        rank, step,
        [this, rank, step, kept = std::string(used_map)](std::uint64_t then_ns, Effects* then) {
          return FinishStep(rank, step, kept, then_ns, then);
        });
  }
  if (*admission == Admission::kAdmit) {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      if (!ranks_[rank].marked[i]) Mark(rank, i, now_ns, effects);
    }
  }
  return EndStep(rank, step, used_map, now_ns, effects);
}

absl::Status LayoutChannel::Abandon(std::uint32_t rank, std::uint64_t step,
                                    absl::string_view reason, std::uint64_t now_ns,
                                    Effects* effects) {
  const auto admission = Admit(rank, step, "AbandonStep");
  if (!admission.ok()) return admission.status();
  RankLayout& mine = ranks_[rank];
  if (*admission == Admission::kEarly) {
    return Postpone(
        rank, step,
        [this, rank, step, kept = std::string(reason)](std::uint64_t then_ns, Effects* then) {
          return Abandon(rank, step, kept, then_ns, then);
        });
  }
  if (*admission == Admission::kIgnore) {
    mine.last_ended = std::max(mine.last_ended, step);
    return absl::OkStatus();
  }
  Start(now_ns);
  const auto unmarked = FirstUnmarked(rank);
  mine.ended = true;
  Void(Breach(absl::StatusCode::kAborted, "STEP_ABANDONED", rank, step, unmarked,
              absl::StrCat("abandoned by this rank: ", reason,
                           ". The step is void on every rank; redo it under the next number.")),
       now_ns, effects);
  return absl::OkStatus();
}

void LayoutChannel::Void(absl::Status why, std::uint64_t now_ns, Effects* effects) {
  if (void_.ok()) void_ = std::move(why);
  GiveUp(effects);
  MaybeFinish(now_ns, effects);
}

void LayoutChannel::GiveUp(Effects* effects) {
  if (given_up_ || !spec_.on_gpu || in_flight_ == 0) return;
  given_up_ = true;
  GivenUpStep given_up{buckets_.front()->operation.gpu.layout, step_, {}};
  for (const RankLayout& rank : ranks_) {
    if (rank.memory.has_value()) given_up.arenas.push_back(rank.memory->gpu);
  }
  effects->given_up.push_back(std::move(given_up));
}

bool LayoutChannel::MaybeSeenComplete() const {
  return spec_.on_gpu && started_ && done_buckets_ == buckets_.size() && !gpu_void_;
}

absl::Status LayoutChannel::InDoubt() const {
  return MakeError(
      absl::StatusCode::kAborted, "STEP_IN_DOUBT",
      absl::StrCat(
          "layout '", name(), "', step ", step_,
          " was lost after its last launch, so that it may be complete on some ranks' GPUs "
          "and void on others': ",
          gpu_doubt_.message(),
          ". Compare the ranks' last steps, or go on from a checkpoint on every rank."),
      {{"job", terms_.job_id}, {"channel", absl::StrCat(channel_)}, {"step", absl::StrCat(step_)}});
}

std::uint32_t LayoutChannel::RanksOfStep() const {
  // Some may be lost since.
  if (SeenComplete() && !buckets_.empty()) {
    return static_cast<std::uint32_t>(buckets_.front()->operation.ranks.size());
  }
  return members_->StepRanks();
}

void LayoutChannel::FinishSeen(std::uint64_t now_ns, Effects* effects) {
  if (!MaybeSeenComplete()) return;
  void_ = gpu_doubt_.ok() ? absl::OkStatus() : InDoubt();
  Finish(now_ns, effects);
}

void LayoutChannel::MaybeFinish(std::uint64_t now_ns, Effects* effects) {
  if (stopped_ || !started_ || in_flight_ > 0) return;
  if (void_.ok() && gpu_void_) {
    void_ =
        MakeError(absl::StatusCode::kAborted, "STEP_VOID",
                  absl::StrCat("layout '", name(), "', step ", step_,
                               ": the gradients of some rank never came to its GPU. The step is "
                               "void on every rank; redo it under the next number."),
                  {{"job", terms_.job_id},
                   {"channel", absl::StrCat(channel_)},
                   {"step", absl::StrCat(step_)}});
  }
  // Too late to be void: from a step's last launch on only the GPUs decide. Then the deadline ends
  // the wait for the ranks' ends, and no more than that.
  const bool seen = !void_.ok() && SeenComplete();
  if (seen) void_ = absl::OkStatus();
  if (void_.ok() && !(seen && now_ns >= deadline_ns_)) {
    if (done_buckets_ < buckets_.size()) return;
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (members_->InSteps(rank) && !ranks_[rank].ended) return;
    }
  }
  Finish(now_ns, effects);
}

void LayoutChannel::Finish(std::uint64_t now_ns, Effects* effects) {
  auto record = std::make_shared<StepRecord>();
  record->verdict = std::move(void_);
  void_ = absl::OkStatus();
  const bool complete = record->verdict.ok();
  record->times.step = step_;
  record->times.complete = complete;
  record->times.commit_ns = now_ns;
  for (const auto& bucket : buckets_) record->times.buckets.push_back(bucket->times);
  record->live_ranks = RanksOfStep();
  record->divisor = terms_.divide_by_world ? members_->world_size() : record->live_ranks;
  // A rank that has not said what it used, but whose gradients are in, may have used everything.
  if (complete && !all_used_ && used_maps_ == record->live_ranks) record->used_map = used_map_;
  stats_.RecordStep(complete, last_ready_ns_, now_ns);
  if (complete) {
    double sum_of_squares = 0;
    std::uint64_t non_finite = 0;
    for (const auto& bucket : buckets_) {
      const BucketNumbers& numbers = bucket->operation.numbers;
      record->numbers.push_back(numbers);
      sum_of_squares += numbers.sum_of_squares;
      non_finite += numbers.non_finite;
    }
    stats_.RecordNumbers(sum_of_squares, non_finite);
  }
  timeline_->Append(record->times);

  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    RankLayout& mine = ranks_[rank];
    if (!complete && mine.memory.has_value() && mine.memory->semaphores != nullptr) {
      // A void step uses up its number: its waits are released, and see that it is void.
      mine.memory->semaphores->DeclareVoid(step_);
      for (std::size_t i = 0; i < buckets_.size(); ++i) {
        mine.memory->semaphores->SignalDone(i, step_);
      }
    }
    if (mine.ended) mine.last_ended = step_;
    mine.ended = false;
    mine.marks = 0;
    std::fill(mine.marked.begin(), mine.marked.end(), false);
    // One that was lost when the GPUs had seen the step complete is told so before its end.
    const bool told = members_->InSteps(rank) || (*members_)[rank].state == RankState::kLost;
    if (told) members_->Send(rank, StepDoneMessage{channel_, record}, effects);
  }
  for (const auto& bucket : buckets_) {
    bucket->state = BucketState::kWaiting;
    bucket->ready_ranks = 0;
    std::fill(bucket->times.ready_ns.begin(), bucket->times.ready_ns.end(), 0);
    bucket->times.start_ns = bucket->times.finish_ns = 0;
  }
  ++step_;
  started_ = false;
  given_up_ = false;
  gpu_void_ = false;
  gpu_doubt_ = absl::OkStatus();
  done_buckets_ = 0;
  last_ready_ns_ = 0;
  used_map_.clear();
  all_used_ = true;
  used_maps_ = 0;
  if (!stopped_) TakeEarly(now_ns, effects);
}

// ---- Membership
// ----------------------------------------------------------------------------------

void LayoutChannel::RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns,
                             Effects* effects) {
  // No bucket can be in flight: each needed this rank's mark in the running step, and it has none.
  rebind_ = true;
  if (exited) ReleaseMemoryOf(rank, effects);
  if (members_->StepRanks() == 0 || !started_) return;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i]->ready_ranks == members_->StepRanks()) Launch(i, effects);
  }
  MaybeFinish(now_ns, effects);
}

void LayoutChannel::RankResumed(std::uint32_t rank) {
  rebind_ = true;
  RankLayout& mine = ranks_[rank];
  mine.last_ended = step_ - 1;  // it is told the number: nothing older is on its way
  if (!mine.memory.has_value() || mine.memory->semaphores == nullptr) return;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    mine.memory->semaphores->SignalDone(i, step_ - 1);
  }
}

void LayoutChannel::Stop(const absl::Status& why) {
  stopped_ = true;
  if (agreement_.ok()) agreement_ = why;
}

void LayoutChannel::ReleaseMemory(Effects* effects) {
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) ReleaseMemoryOf(rank, effects);
}

void LayoutChannel::ReleaseMemoryOf(std::uint32_t rank, Effects* effects) {
  RankLayout& mine = ranks_[rank];
  mine.early.clear();
  if (mine.held != nullptr) effects->releases.push_back(std::move(mine.held));
  if (!mine.memory.has_value()) return;
  effects->releases.push_back(std::move(mine.memory->arena));
  if (mine.memory->gpu != nullptr) effects->releases.push_back(std::move(mine.memory->gpu));
  mine.memory.reset();
}

void LayoutChannel::Tick(std::uint64_t now_ns, Effects* effects) {
  if (stopped_) return;
  if (!ready_ && agreement_.ok()) {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].registered || now_ns < ranks_[rank].request.deadline_ns) continue;
      std::vector<std::uint32_t> absent, unmapped;
      for (std::uint32_t other = 0; other < ranks_.size(); ++other) {
        if (!members_->InSteps(other)) continue;
        if (!ranks_[other].registered) {
          absent.push_back(other);
        } else if (!ranks_[other].memory.has_value()) {
          unmapped.push_back(other);
        }
      }
      FailAgreement(
          MakeError(absl::StatusCode::kDeadlineExceeded, "LAYOUT_TIMEOUT",
                    absl::StrCat("layout '", name(), "' was not agreed in time",
                                 absent.empty() ? ""
                                                : absl::StrCat("; not registered by rank ",
                                                               absl::StrJoin(absent, ", ")),
                                 unmapped.empty() ? ""
                                                  : absl::StrCat("; not mapped by rank ",
                                                                 absl::StrJoin(unmapped, ", ")),
                                 ". Check that those trainers run and use the same job_id."),
                    {{"job", terms_.job_id},
                     {"rank", !absent.empty()     ? absl::StrCat(absent.front())
                              : !unmapped.empty() ? absl::StrCat(unmapped.front())
                                                  : ""},
                     {"channel", absl::StrCat(channel_)}}),
          effects);
      return;
    }
  }
  if (started_ && void_.ok() && now_ns >= deadline_ns_) {
    // The first of those that are missing, none if a reduction is; the message names them all.
    std::uint32_t missing = 0;
    while (missing < ranks_.size() &&
           (!members_->InSteps(missing) ||
            (ranks_[missing].ended && !FirstOf(NotWritten(missing), true).has_value()))) {
      ++missing;
    }
    const bool known = missing < ranks_.size();
    auto bucket = known ? FirstUnmarked(missing) : std::nullopt;
    if (known && !bucket.has_value()) bucket = FirstOf(NotWritten(missing), true);
    Void(MakeError(absl::StatusCode::kDeadlineExceeded, "STEP_TIMEOUT",
                   absl::StrCat("layout '", name(), "', step ", step_,
                                " was not finished within the job's step_timeout: ", Missing(),
                                ". The step is void on every rank: look at those ranks, then redo "
                                "it, or raise step_timeout."),
                   {{"job", terms_.job_id},
                    {"rank", known ? absl::StrCat(missing) : ""},
                    {"channel", absl::StrCat(channel_)},
                    {"step", absl::StrCat(step_)},
                    {"bucket", bucket.has_value() ? absl::StrCat(*bucket) : ""}}),
         now_ns, effects);
  }
}

// ---- For people
// ----------------------------------------------------------------------------------

std::optional<std::size_t> LayoutChannel::FirstUnmarked(std::uint32_t rank) const {
  return FirstOf(ranks_[rank].marked, false);
}

std::vector<std::uint32_t> LayoutChannel::MissingRanks() const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; started_ && rank < ranks_.size(); ++rank) {
    if (members_->InSteps(rank) && !ranks_[rank].ended) missing.push_back(rank);
  }
  return missing;
}

std::string LayoutChannel::Missing() const {
  if (!started_) return "";
  std::vector<std::string> missing;
  for (const std::uint32_t rank : MissingRanks()) {
    if (missing.size() == kNamed) {
      missing.push_back("...");
      break;
    }
    if (FirstUnmarked(rank).has_value()) {
      missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has not marked bucket ",
                                     Ranges(ranks_[rank].marked, false), " ready"));
    } else {
      missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has not ended the step"));
    }
  }
  for (std::uint32_t rank = 0; rank < ranks_.size() && missing.size() < kNamed; ++rank) {
    const std::vector<bool> not_written = NotWritten(rank);
    if (!FirstOf(not_written, true).has_value()) continue;
    missing.push_back(absl::StrCat("rank ", members_->Name(rank), " has marked bucket ",
                                   Ranges(not_written, true),
                                   " ready, but its GPU has not written it"));
  }
  if (missing.empty() && in_flight_ > 0) missing.push_back("a reduction is running");
  return absl::StrJoin(missing, "; ");
}

std::vector<bool> LayoutChannel::NotWritten(std::uint32_t rank) const {
  const RankLayout& mine = ranks_[rank];
  if (!spec_.on_gpu || !mine.memory.has_value() || mine.memory->semaphores == nullptr) return {};
  std::vector<bool> not_written(buckets_.size());
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    not_written[i] = mine.marked[i] && buckets_[i]->state != BucketState::kDone &&
                     !mine.memory->semaphores->ReadyShown(i, step_);
  }
  return not_written;
}

std::uint32_t LayoutChannel::Divisor() const {
  return terms_.divide_by_world ? members_->world_size() : members_->StepRanks();
}

}  // namespace gradsync
