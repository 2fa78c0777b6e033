#include "client/src/step_client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/done_wait.h"
#include "client/src/error.h"
#include "client/src/utf8.h"
#include "gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

constexpr absl::Duration kQueryTimeout = absl::Seconds(1);
// How long to wait for the StepDone that follows the void word, or for the session's end that
// follows a poisoned word.
constexpr absl::Duration kVerdictTimeout = absl::Seconds(10);
// How often a wait looks at a word that a GPU writes: a GPU wakes no futex.
constexpr absl::Duration kDeviceWordPeriod = absl::Microseconds(200);

ErrorFields FieldsOf(const Connection& connection, std::uint32_t channel) {
  ErrorFields fields = connection.Fields();
  fields.channel = channel;
  return fields;
}

bool AllZero(const std::byte* data, std::size_t bytes) {
  return bytes == 0 || (data[0] == std::byte{0} && std::memcmp(data, data + 1, bytes - 1) == 0);
}

}  // namespace

StepClient::StepClient(std::shared_ptr<Connection> connection, std::uint32_t channel,
                       std::string name, const LayoutPlan& plan, std::shared_ptr<std::byte> arena,
                       std::shared_ptr<MappedMemory> semaphores)
    : connection_(std::move(connection)),
      channel_(channel),
      bucket_count_(plan.buckets.size()),
      gradients_(plan.gradients),
      errors_(FieldsOf(*connection_, channel), std::move(name), plan.buckets.size(),
              plan.gradients.size()),
      on_device_(plan.memory != ArenaMemory::kHost),
      max_outstanding_(on_device_ ? kMaxOutstanding : 1),
      arena_(std::move(arena)),
      semaphores_(std::move(semaphores)),
      open_(plan.buckets.size(), plan.gradients.size()),
      decided_(max_outstanding_) {
  for (const PlannedSpan& bucket : plan.buckets) {
    reduced_bytes_ += bucket.count * ItemSize(bucket.dtype);
  }
  last_marks_.fill(absl::InfinitePast());
}

void StepClient::Begin(std::uint64_t first_step) {
  absl::MutexLock lock(&mutex_);
  // Another rank may have abandoned the first step already.
  if (decided_.last() > 0) return;
  decided_.SkipTo(first_step - 1);
  next_step_.store(first_step, std::memory_order_release);
}

absl::Status StepClient::CheckNoOpenStep(absl::string_view call) const {
  absl::MutexLock lock(&mutex_);
  return CheckNoOpenStepLocked(call);
}

absl::Status StepClient::CheckNoOpenStepLocked(absl::string_view call) const {
  const std::uint64_t undecided = decided_.last() + 1;
  if (open_.untouched() && undecided == next_step()) return absl::OkStatus();
  return errors_.OutOfOrderError(
      undecided, call, "while this step is open; end or abandon it and wait for it first");
}

// ---- Replacement --------------------------------------------------------------------------------

absl::Status StepClient::BeginReplacement() {
  absl::MutexLock lock(&mutex_);
  if (!end_.ok()) return end_;
  if (replacing_) return BeingReplacedError(next_step(), "ReplaceLayout");
  if (auto status = CheckNoOpenStepLocked("ReplaceLayout"); !status.ok()) return status;
  replacing_ = true;
  return absl::OkStatus();
}

void StepClient::ReplacementFailed() {
  absl::MutexLock lock(&mutex_);
  replacing_ = false;
}

void StepClient::Replaced() {
  OnSessionEnd(errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kLayoutReplaced,
                            next_step(), std::nullopt,
                            "the layout was replaced; use the one that ReplaceLayout returned"));
}

absl::Status StepClient::BeingReplacedError(std::uint64_t step, absl::string_view call) const {
  return errors_.OutOfOrderError(step, call,
                                 "while the layout is being replaced; wait for ReplaceLayout");
}

// ---- Which call fits now ------------------------------------------------------------------------

bool StepClient::MaybeDecided(std::uint64_t step) const {
  if (step <= decided_.last()) return false;
  return step <= ended_step_ || (on_device_ && step == next_step() && open_.all_marked());
}

absl::Status StepClient::EndOf(std::uint64_t step) const {
  if (!MaybeDecided(step) || ErrorReason(end_) != reason::kDaemonLost) return end_;
  return errors_.Make(
      absl::StatusCode::kUnavailable, reason::kStepInDoubt, step, std::nullopt,
      absl::StrCat(step <= ended_step_ ? "EndStep was sent" : "every bucket was marked ready",
                   " and no verdict came before the daemon was lost: the step may be "
                   "complete or void on other ranks. Join again and compare the ranks' last "
                   "steps. ",
                   end_.message()));
}

absl::Status StepClient::Admit(std::uint64_t step, absl::string_view call) const {
  constexpr absl::string_view kAfterEnd = "after this rank's EndStep";
  if (!end_.ok()) return EndOf(step);
  if (step < next_step()) {
    if (const auto verdict = decided_.Find(step); verdict != nullptr && !verdict->status.ok()) {
      return verdict->status;
    }
    return step > decided_.last() ? errors_.OutOfOrderError(step, call, kAfterEnd)
                                  : errors_.StaleStepError(step, next_step());
  }
  if (connection_->left()) {
    return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kLeft, step, std::nullopt,
                        absl::StrCat(call, " after this rank has left"));
  }
  if (step > next_step()) return errors_.FutureStepError(step, next_step(), call);
  if (replacing_) return BeingReplacedError(step, call);
  if (open_.ended()) return errors_.OutOfOrderError(step, call, kAfterEnd);
  if (open_.abandoned()) {
    return errors_.OutOfOrderError(step, call, "after this rank's AbandonStep");
  }
  if (step > decided_.last() + max_outstanding_) {
    return errors_.OutOfOrderError(
        step, call,
        absl::StrCat("while ", max_outstanding_,
                     " steps are under way; first wait for the verdict of step ",
                     decided_.last() + 1, " with WaitStep"));
  }
  return absl::OkStatus();
}

absl::Status StepClient::AdmitMarkLocked(std::uint64_t step, std::size_t bucket) const {
  if (auto status = Admit(step, "MarkReady"); !status.ok()) return status;
  if (bucket >= bucket_count_) return errors_.UnknownBucketError(step, bucket);
  if (!open_.marked(bucket)) return absl::OkStatus();
  return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, step, bucket,
                      "marked ready a second time in this step");
}

absl::Status StepClient::AdmitEnd(std::uint64_t step, const std::vector<bool>& used,
                                  absl::string_view call) const {
  if (auto status = Admit(step, call); !status.ok()) return status;
  if (used.empty() || used.size() == gradients_.size()) return absl::OkStatus();
  return errors_.WrongUsedSizeError(step, call, used.size());
}

// ---- The trainer's calls ------------------------------------------------------------------------

absl::Status StepClient::MarkUnused(std::uint64_t step, std::size_t parameter) {
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = Admit(step, "MarkUnused"); !status.ok()) return status;
    if (parameter >= gradients_.size()) return errors_.UnknownParameterError(step, parameter);
    const std::uint32_t bucket = gradients_[parameter].bucket;
    if (open_.marked(bucket)) {
      return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, step,
                          bucket,
                          absl::StrCat("parameter ", parameter,
                                       " marked unused after its bucket was marked ready"));
    }
    if (open_.unused(parameter)) return absl::OkStatus();
    open_.MarkUnused(parameter);
  }
  // On a GPU, the stream that marks the bucket fills it.
  if (on_device_) return absl::OkStatus();
  // Not under the lock, because gradients may be large. The bucket still belongs to the trainer.
  const PlannedSpan& gradient = gradients_[parameter];
  std::byte* const data = arena_.get() + gradient.offset;
  const std::size_t bytes = gradient.count * ItemSize(gradient.dtype);
  if (AllZero(data, bytes)) return absl::OkStatus();
  HeldGradient held{parameter, gradient.offset, {data, data + bytes}};
  std::memset(data, 0, bytes);
  absl::MutexLock lock(&mutex_);
  if (step == next_step() && end_.ok()) open_.Hold(std::move(held));
  return absl::OkStatus();
}

void StepClient::AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const {
  if (!open_.has_unused()) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const PlannedSpan& gradient = gradients_[i];
    if (!open_.unused(i) || gradient.bucket != bucket) continue;
    spans->push_back({gradient.offset, gradient.count * ItemSize(gradient.dtype)});
  }
}

absl::Status StepClient::MarkReady(std::uint64_t step, std::size_t bucket) {
  const absl::Time start = absl::Now();
  if (on_device_) return errors_.NeedsStreamsError(step, "MarkReady");
  return CommitMark(step, bucket, start);
}

absl::Status StepClient::AdmitMark(std::uint64_t step, std::size_t bucket,
                                   std::vector<ByteSpan>* zeros) const {
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitMarkLocked(step, bucket); !status.ok()) return status;
  AddUnused(bucket, zeros);
  return absl::OkStatus();
}

absl::Status StepClient::CommitMark(std::uint64_t step, std::size_t bucket, absl::Time start) {
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitMarkLocked(step, bucket); !status.ok()) return status;
  Mark(bucket);
  // Under the lock, so that EndStep cannot overtake it.
  connection_->stream().SendBucketReady(channel_, step, static_cast<std::uint32_t>(bucket));
  CountMarks(step, 1, start);
  return absl::OkStatus();
}

void StepClient::Mark(std::size_t bucket) {
  open_.Mark(bucket);
  // If the step before was not waited for, its gradients are overwritten now.
  restoration_.reset();
}

void StepClient::CountMarks(std::uint64_t step, std::size_t marks, absl::Time start) {
  const absl::Time now = absl::Now();
  last_mark(step) = now;
  SessionCounters& counters = connection_->counters();
  counters.buckets_marked.fetch_add(marks, std::memory_order_relaxed);
  counters.mark_ready_ns.fetch_add(absl::ToInt64Nanoseconds(now - start),
                                   std::memory_order_relaxed);
}

absl::Status StepClient::EndStep(std::uint64_t step, const std::vector<bool>& used) {
  absl::MutexLock lock(&mutex_);
  if (auto status = Admit(step, "EndStep"); !status.ok()) return status;
  if (!open_.all_marked()) {
    return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, step,
                        open_.unmarked().front(), "EndStep, but this bucket was not marked ready");
  }
  if (auto status = AdmitEnd(step, used, "EndStep"); !status.ok()) return status;
  SendEndStep(step, used, /*ready_rest=*/false);
  return absl::OkStatus();
}

absl::Status StepClient::FinishStep(std::uint64_t step, const std::vector<bool>& used) {
  const absl::Time start = absl::Now();
  if (on_device_) return errors_.NeedsStreamsError(step, "FinishStep");
  return CommitFinish(step, used, start);
}

absl::Status StepClient::AdmitFinish(std::uint64_t step, const std::vector<bool>& used,
                                     std::vector<std::size_t>* rest,
                                     std::vector<ByteSpan>* zeros) const {
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitEnd(step, used, "FinishStep"); !status.ok()) return status;
  *rest = open_.unmarked();
  for (const std::size_t bucket : *rest) AddUnused(bucket, zeros);
  return absl::OkStatus();
}

absl::Status StepClient::CommitFinish(std::uint64_t step, const std::vector<bool>& used,
                                      absl::Time start) {
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitEnd(step, used, "FinishStep"); !status.ok()) return status;
  const std::vector<std::size_t> rest = open_.unmarked();
  for (const std::size_t bucket : rest) Mark(bucket);
  if (!rest.empty()) CountMarks(step, rest.size(), start);
  SendEndStep(step, used, /*ready_rest=*/!rest.empty());
  return absl::OkStatus();
}

void StepClient::SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest) {
  v1::SessionRequest request;
  request.mutable_end_step()->set_channel(channel_);
  request.mutable_end_step()->set_step(step);
  request.mutable_end_step()->set_used_map(EncodeUsedMap(open_.Used(used)));
  request.mutable_end_step()->set_ready_rest(ready_rest);
  open_.End();
  ended_step_ = step;
  connection_->stream().Send(std::move(request));
  if (on_device_) Open(step + 1);
}

void StepClient::Open(std::uint64_t step) {
  open_ = OpenStep(bucket_count_, gradients_.size());
  next_step_.store(step, std::memory_order_release);
}

absl::Status StepClient::AbandonStep(std::uint64_t step, absl::string_view reason) {
  absl::MutexLock lock(&mutex_);
  // Already void or abandoned: nothing to do.
  const auto verdict = decided_.Find(step);
  if (end_.ok() && verdict != nullptr && !verdict->status.ok()) return absl::OkStatus();
  if (end_.ok() && step == next_step() && open_.abandoned()) return absl::OkStatus();
  if (auto status = Admit(step, "AbandonStep"); !status.ok()) return status;
  v1::SessionRequest request;
  request.mutable_abandon_step()->set_channel(channel_);
  request.mutable_abandon_step()->set_step(step);
  request.mutable_abandon_step()->set_reason(ValidUtf8(reason.substr(0, kMaxReasonBytes)));
  open_.Abandon();
  connection_->stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::Status StepClient::WaitBucket(std::uint64_t step, std::size_t bucket,
                                    absl::Duration timeout) {
  if (bucket >= bucket_count_) return errors_.UnknownBucketError(step, bucket);
  {
    absl::MutexLock lock(&mutex_);
    if (step > next_step()) {
      return end_.ok() ? errors_.FutureStepError(step, next_step(), "WaitBucket") : end_;
    }
    if (const auto verdict = decided_.Find(step); verdict != nullptr) return verdict->status;
    if (!end_.ok()) return EndOf(step);
    if (step <= decided_.last()) return errors_.StaleStepError(step, next_step());
  }
  DaemonSilence silence(*connection_);
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    absl::Duration slice = std::min(deadline - absl::Now(), silence.slice());
    if (on_device_) slice = std::min(slice, kDeviceWordPeriod);
    switch (WaitDone(semaphore(bucket).done, step, slice)) {
      case DoneWait::kReached:
        return AfterRelease(step, bucket, /*poisoned=*/false);
      case DoneWait::kPoisoned:
        return AfterRelease(step, bucket, /*poisoned=*/true);
      case DoneWait::kTimedOut:
        break;
    }
    if (absl::Now() >= deadline) return TimedOut(step, bucket, timeout);
    if (silence.Look()) return Silent(step, bucket, silence);
  }
}

absl::Status StepClient::AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned) {
  // The daemon stored it before the done word.
  const bool is_void = header().void_step.load(std::memory_order_acquire) == step;
  absl::MutexLock lock(&mutex_);
  if (is_void || poisoned) {
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return Settled(step); };
    mutex_.AwaitWithTimeout(absl::Condition(&settled), kVerdictTimeout);
  }
  if (const auto verdict = decided_.Find(step); verdict != nullptr) return verdict->status;
  if (!end_.ok()) return EndOf(step);
  if (poisoned || is_void) {
    return errors_.VoidStepError(step, bucket);
  }
  // This thread woke up so late that the step's verdict is not kept any more. The step may have
  // been void, because void_step holds only the last void step.
  if (step <= decided_.last()) {
    return errors_.Make(
        absl::StatusCode::kFailedPrecondition, reason::kStaleStep, step, bucket,
        absl::StrCat("it was decided too long ago, and its verdict is not kept; the next step is ",
                     next_step()));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepClient::WaitStep(std::uint64_t step, absl::Duration timeout) {
  std::shared_ptr<const StepVerdict> verdict;
  std::shared_ptr<Restoration> restoration;
  DaemonSilence silence(*connection_);
  Awaited awaited = Awaited::kMet;
  {
    absl::MutexLock lock(&mutex_);
    if (step > next_step()) {
      return end_.ok() ? errors_.FutureStepError(step, next_step(), "WaitStep") : end_;
    }
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return Settled(step); };
    awaited =
        AwaitUnlessSilent(&mutex_, absl::Condition(&settled), absl::Now() + timeout, &silence);
    // A verdict counts, also if the session has ended since.
    verdict = decided_.Find(step);
    if (restoration_ != nullptr && restoration_->step() == step) restoration = restoration_;
    if (verdict == nullptr) {
      if (!end_.ok()) return EndOf(step);
      if (step <= decided_.last()) return errors_.StaleStepError(step, next_step());
    }
  }
  if (verdict == nullptr) {
    return awaited == Awaited::kSilent ? Silent(step, std::nullopt, silence)
                                       : TimedOut(step, std::nullopt, timeout);
  }
  if (!verdict->status.ok()) return verdict->status;
  if (restoration != nullptr) restoration->Restore(arena_.get());
  return verdict->result;
}

absl::Status StepClient::AdmitStreamWait(std::uint64_t step, std::optional<std::size_t> bucket,
                                         std::vector<std::size_t>* waited) const {
  if (bucket.has_value() && *bucket >= bucket_count_) {
    return errors_.UnknownBucketError(step, *bucket);
  }
  absl::MutexLock lock(&mutex_);
  if (step > next_step()) {
    return end_.ok() ? errors_.FutureStepError(step, next_step(), "WaitOnStream") : end_;
  }
  const auto verdict = decided_.Find(step);
  if (verdict != nullptr && !verdict->status.ok()) return verdict->status;
  if (!end_.ok()) return EndOf(step);
  if (verdict == nullptr && step <= decided_.last()) {
    return errors_.StaleStepError(step, next_step());
  }
  const std::size_t begin = bucket.value_or(0);
  const std::size_t end = bucket.has_value() ? begin + 1 : bucket_count_;
  for (std::size_t i = begin; i < end; ++i) {
    if (step == next_step() && !open_.marked(i)) {
      return errors_.Make(
          absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, step, i,
          "WaitOnStream of a bucket that was not marked ready; mark it first, or the "
          "stream may wait forever");
    }
    if (!SemaphoreReleased(semaphore(i).done.load(std::memory_order_acquire), step)) {
      waited->push_back(i);
    }
  }
  return absl::OkStatus();
}

void StepClient::BeginRelease() {
  absl::MutexLock lock(&mutex_);
  KeepPoisoned();
  releasing_ = true;
}

void StepClient::EndRelease() {
  std::unique_ptr<PoisonKeeper> keeper;  // ends its thread after the lock is released
  absl::MutexLock lock(&mutex_);
  keeper.swap(poison_keeper_);
}

absl::Status StepClient::Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                                const DaemonSilence& silence) const {
  return errors_.Make(absl::StatusCode::kUnavailable, reason::kDaemonSilent, step, bucket,
                      absl::StrCat(silence.Description(), "; waits can be repeated"));
}

absl::Status StepClient::TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                                  absl::Duration timeout) {
  std::string missing = "the daemon has not said who is missing";
  // A poll (timeout 0) must return at once, and comes often: it asks nothing.
  if (timeout > absl::ZeroDuration()) {
    absl::MutexLock lock(&mutex_);
    if (asked_step_ != step) {
      asked_step_ = step;
      missing_.reset();
      v1::SessionRequest request;
      request.mutable_query_step()->set_channel(channel_);
      request.mutable_query_step()->set_step(step);
      connection_->stream().Send(std::move(request));
    }
    const auto answered = [this, step]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return missing_.has_value() || Settled(step);
    };
    mutex_.AwaitWithTimeout(absl::Condition(&answered), kQueryTimeout);
    if (missing_.has_value() && !missing_->empty()) missing = *missing_;
  }
  return errors_.Make(
      absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout, step, bucket,
      absl::StrCat("not done within ", absl::FormatDuration(timeout), ": ", missing));
}

// ---- The daemon's messages ----------------------------------------------------------------------

void StepClient::OnStepDone(const v1::StepDone& done) {
  auto verdict = std::make_shared<StepVerdict>(DecodeVerdict(done, gradients_.size()));
  if (done.verdict() != v1::VERDICT_COMPLETE && verdict->status.ok()) {
    verdict->status = errors_.VoidStepError(done.step(), std::nullopt);
  }
  const bool complete = verdict->status.ok();

  SessionCounters& counters = connection_->counters();
  absl::MutexLock lock(&mutex_);
  if (done.step() <= decided_.last()) return;
  if (complete) {
    counters.steps_complete.fetch_add(1, std::memory_order_relaxed);
    counters.bytes_reduced.fetch_add(reduced_bytes_, std::memory_order_relaxed);
  } else {
    counters.steps_void.fetch_add(1, std::memory_order_relaxed);
  }
  if (absl::Time& mark = last_mark(done.step()); mark != absl::InfinitePast()) {
    counters.exposed_ns.fetch_add(absl::ToInt64Nanoseconds(absl::Now() - mark),
                                  std::memory_order_relaxed);
    mark = absl::InfinitePast();
  }
  // Gradients that no rank used are put back; the trainer redoes those of a void step. An earlier
  // step's restoration stays, because it may be waited for after another rank abandoned this one.
  auto held = open_.TakeHeld(verdict->result.used);
  if (complete && !held.empty()) {
    restoration_ = std::make_shared<Restoration>(done.step(), std::move(held));
  }
  decided_.Add(std::move(verdict));
  if (next_step() <= done.step()) Open(done.step() + 1);
}

void StepClient::OnResume(std::uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step <= next_step()) return;
  // The other ranks decided steps without this one.
  decided_.SkipTo(step - 1);
  restoration_.reset();
  next_step_.store(step, std::memory_order_release);
}

void StepClient::OnStepState(const v1::StepState& state) {
  absl::MutexLock lock(&mutex_);
  if (state.step() == asked_step_) missing_ = state.missing();
  asked_step_ = 0;
}

void StepClient::OnSessionEnd(const absl::Status& end) {
  Poison();
  absl::MutexLock lock(&mutex_);
  if (!end_.ok()) return;
  end_ = end;
  open_.DropHeld();
  if (on_device_ && !releasing_) KeepPoisoned();
}

void StepClient::KeepPoisoned() {
  if (poison_keeper_ != nullptr) return;
  poison_keeper_ = std::make_unique<PoisonKeeper>(&semaphore(0), bucket_count_, next_step());
}

void StepClient::Poison() const {
  for (std::size_t i = 0; i < bucket_count_; ++i) {
    PoisonDone(&semaphore(i).done, next_step());
  }
}

}  // namespace gradsync::client
