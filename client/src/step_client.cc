#include "client/src/step_client.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/error.h"
#include "client/src/state_reader.h"
#include "client/src/utf8.h"
#include "gradsync/duration_text.h"
#include "gradsync/limits.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// Before its deadline a wait asks the daemon which ranks are late.
constexpr absl::Duration kQuestionTime = absl::Seconds(1);
// How much longer it waits for the answer of a busy daemon.
constexpr absl::Duration kLateAnswer = absl::Milliseconds(200);
// How long to wait for the StepDone of a step that is void, or after which another one is, and for
// the session's end that follows a poisoned word.
constexpr absl::Duration kVerdictTimeout = absl::Seconds(10);

ErrorFields FieldsOf(const Connection& connection, std::uint32_t channel) {
  ErrorFields fields = connection.Fields();
  fields.channel = channel;
  return fields;
}

bool AllZero(const std::byte* data, std::size_t bytes) {
  return bytes == 0 || (data[0] == std::byte{0} && std::memcmp(data, data + 1, bytes - 1) == 0);
}

// When a wait until `deadline` asks which ranks are late.
absl::Time QuestionTime(absl::Time deadline, absl::Duration timeout) {
  return deadline - std::clamp(timeout / 2, absl::ZeroDuration(), kQuestionTime);
}

// After the error `status` of a wait, the step goes on.
bool Goes(const absl::Status& status) {
  const std::string why = ErrorReason(status);
  return why == reason::kWaitTimeout || why == reason::kDaemonSilent;
}

}  // namespace

void StepClient::Pinned(absl::Duration timeout, absl::FunctionRef<bool()> wait) {
  StateReader& reader = connection_->state_reader();
  // A poll without an answer changes nothing: it neither begins a reading nor ends one.
  if (timeout <= absl::ZeroDuration()) {
    if (!wait()) StatePin(&reader).MayChange();
    return;
  }
  StatePin pin(&reader);
  if (!wait()) pin.MayChange();
}

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
      arena_(std::move(arena)),
      words_(std::move(semaphores), plan.buckets.size(), on_device_),
      progress_(*connection_, errors_, plan.buckets.size(), plan.gradients.size(), on_device_),
      counters_(plan, &connection_->counters()) {}

void StepClient::Begin(std::uint64_t first_step) {
  absl::MutexLock lock(&mutex_);
  progress_.Begin(first_step);
}

absl::Status StepClient::CheckNoOpenStep(absl::string_view call) const {
  absl::MutexLock lock(&mutex_);
  return progress_.CheckNoOpenStep(call);
}

// ---- Replacement --------------------------------------------------------------------------------

absl::Status StepClient::BeginReplacement() {
  absl::MutexLock lock(&mutex_);
  return progress_.BeginReplacement();
}

void StepClient::ReplacementFailed() {
  absl::MutexLock lock(&mutex_);
  progress_.ReplacementFailed();
}

void StepClient::Replaced() {
  OnSessionEnd(errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kLayoutReplaced,
                            next_step(), std::nullopt,
                            "the layout was replaced; use the one that ReplaceLayout returned"));
}

// ---- Release ------------------------------------------------------------------------------------

void StepClient::SendRelease() {
  v1::SessionRequest request;
  request.mutable_release_layout()->set_channel(channel_);
  connection_->stream().Send(std::move(request));
  progress_.SetEnd(errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kLayoutReleased,
                                next_step(), std::nullopt, "this rank has released the layout"));
  progress_.open().DropHeld();
}

absl::Status StepClient::Release() {
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = progress_.CheckMayEnd("Release"); !status.ok()) return status;
    SendRelease();
  }
  words_.Poison(next_step());
  return absl::OkStatus();
}

void StepClient::Drop() {
  bool frozen = false;
  {
    absl::MutexLock lock(&mutex_);
    // The layout has ended, or its end is on its way.
    if (!progress_.end().ok() || progress_.replacing()) return;
    const OpenStep& open = progress_.open();
    frozen = open.ended();
    if (!open.untouched() && !open.ended() && !open.abandoned()) {
      SendAbandonStep("its layout was destroyed");
    }
    SendRelease();
  }
  // The trainer does not wait for the step's verdict.
  if (frozen) StatePin(&connection_->state_reader()).MayChange();
}

// ---- The trainer's calls ------------------------------------------------------------------------

absl::Status StepClient::MarkUnused(std::uint64_t step, std::size_t parameter) {
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = progress_.Admit(step, "MarkUnused"); !status.ok()) return status;
    if (parameter >= gradients_.size()) return errors_.UnknownParameterError(step, parameter);
    const std::uint32_t bucket = gradients_[parameter].bucket;
    if (progress_.open().marked(bucket)) {
      return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, step,
                          bucket,
                          absl::StrCat("parameter ", parameter,
                                       " marked unused after its bucket was marked ready"));
    }
    if (progress_.open().unused(parameter)) return absl::OkStatus();
    progress_.open().MarkUnused(parameter);
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
  if (step == next_step() && progress_.end().ok()) progress_.open().Hold(std::move(held));
  return absl::OkStatus();
}

void StepClient::AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const {
  if (!progress_.open().has_unused()) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const PlannedSpan& gradient = gradients_[i];
    if (!progress_.open().unused(i) || gradient.bucket != bucket) continue;
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
  if (auto status = progress_.AdmitMark(step, bucket); !status.ok()) return status;
  AddUnused(bucket, zeros);
  return absl::OkStatus();
}

absl::Status StepClient::CommitMark(std::uint64_t step, std::size_t bucket, absl::Time start) {
  absl::MutexLock lock(&mutex_);
  if (auto status = progress_.AdmitMark(step, bucket); !status.ok()) return status;
  const bool first = progress_.open().no_mark();
  Mark(bucket);
  // Under the lock, so that EndStep cannot overtake it.
  connection_->stream().SendBucketReady(channel_, step, static_cast<std::uint32_t>(bucket),
                                        first ? PositionOf(step) : nullptr);
  counters_.CountMarks(step, 1, start);
  return absl::OkStatus();
}

const Position* StepClient::PositionOf(std::uint64_t step) {
  if (position_step_ != step) {
    position_step_ = step;
    position_ = std::exchange(next_position_, std::nullopt);
  }
  return position_.has_value() ? &*position_ : nullptr;
}

void StepClient::SetPosition(Position position) {
  absl::MutexLock lock(&mutex_);
  next_position_ = position;
}

void StepClient::Mark(std::size_t bucket) {
  progress_.open().Mark(bucket);
  // If the step before was not waited for, its gradients are overwritten now.
  restoration_.reset();
}

absl::Status StepClient::EndStep(std::uint64_t step, const std::vector<bool>& used) {
  absl::MutexLock lock(&mutex_);
  if (auto status = progress_.Admit(step, "EndStep"); !status.ok()) return status;
  if (!progress_.open().all_marked()) {
    return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, step,
                        progress_.open().unmarked().front(),
                        "EndStep, but this bucket was not marked ready");
  }
  if (auto status = progress_.AdmitEnd(step, used, "EndStep"); !status.ok()) return status;
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
  if (auto status = progress_.AdmitEnd(step, used, "FinishStep"); !status.ok()) return status;
  *rest = progress_.open().unmarked();
  for (const std::size_t bucket : *rest) AddUnused(bucket, zeros);
  return absl::OkStatus();
}

absl::Status StepClient::CommitFinish(std::uint64_t step, const std::vector<bool>& used,
                                      absl::Time start) {
  absl::MutexLock lock(&mutex_);
  if (auto status = progress_.AdmitEnd(step, used, "FinishStep"); !status.ok()) return status;
  const std::vector<std::size_t> rest = progress_.open().unmarked();
  for (const std::size_t bucket : rest) Mark(bucket);
  if (!rest.empty()) counters_.CountMarks(step, rest.size(), start);
  SendEndStep(step, used, /*ready_rest=*/!rest.empty());
  return absl::OkStatus();
}

void StepClient::SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest) {
  v1::SessionRequest request;
  request.mutable_end_step()->set_channel(channel_);
  request.mutable_end_step()->set_step(step);
  request.mutable_end_step()->set_used_map(EncodeUsedMap(progress_.open().Used(used)));
  request.mutable_end_step()->set_ready_rest(ready_rest);
  if (const Position* position = PositionOf(step)) {
    request.mutable_end_step()->mutable_position()->set_epoch(position->epoch);
    request.mutable_end_step()->mutable_position()->set_batch(position->batch);
  }
  // Under the lock, so that the verdict comes after it.
  if (connection_->replacement()) connection_->job_channel().OnEndStep(channel_, step);
  // From here the state stays as it is, until a wait returns to the trainer.
  connection_->state_reader().FreezeUntilWait();
  connection_->stream().Send(std::move(request));
  progress_.EndOpenStep();
}

absl::Status StepClient::AbandonStep(std::uint64_t step, absl::string_view reason) {
  // After the lock: the reader stops, and then the trainer may change the state.
  StatePin pin(&connection_->state_reader());
  pin.MayChange();
  absl::MutexLock lock(&mutex_);
  // Already void or abandoned: nothing to do.
  const auto verdict = progress_.Verdict(step);
  const bool is_void = verdict != nullptr && !verdict->status.ok();
  const bool abandoned = step == next_step() && progress_.open().abandoned();
  if (progress_.end().ok() && (is_void || abandoned)) return absl::OkStatus();
  if (auto status = progress_.Admit(step, "AbandonStep"); !status.ok()) return status;
  SendAbandonStep(reason);
  return absl::OkStatus();
}

void StepClient::SendAbandonStep(absl::string_view reason) {
  v1::SessionRequest request;
  request.mutable_abandon_step()->set_channel(channel_);
  request.mutable_abandon_step()->set_step(next_step());
  request.mutable_abandon_step()->set_reason(ValidUtf8(reason.substr(0, kMaxReasonBytes)));
  progress_.open().Abandon();
  connection_->stream().Send(std::move(request));
}

absl::Status StepClient::WaitBucket(std::uint64_t step, std::size_t bucket,
                                    absl::Duration timeout) {
  absl::Status status;
  Pinned(timeout,
         [&] { return (status = AwaitBucket(step, bucket, timeout)).ok() || Goes(status); });
  return status;
}

absl::Status StepClient::AwaitBucket(std::uint64_t step, std::size_t bucket,
                                     absl::Duration timeout) {
  if (bucket >= bucket_count_) return errors_.UnknownBucketError(step, bucket);
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = progress_.AdmitWait(step, "WaitBucket"); !status.ok()) return status;
    if (const auto verdict = progress_.Verdict(step); verdict != nullptr) return verdict->status;
    if (auto status = progress_.CheckUndecided(step); !status.ok()) return status;
  }
  DaemonSilence silence(*connection_);
  const absl::Time deadline = absl::Now() + timeout;
  DoneWait wait = words_.Await(bucket, step, QuestionTime(deadline, timeout), &silence);
  if (wait == DoneWait::kTimedOut && AskWhoIsLate(step, timeout)) {
    wait = words_.Await(bucket, step, deadline, &silence);
  }
  switch (wait) {
    case DoneWait::kReached:
      return AfterRelease(step, bucket, /*poisoned=*/false);
    case DoneWait::kPoisoned:
      return AfterRelease(step, bucket, /*poisoned=*/true);
    case DoneWait::kSilent:
      return Silent(step, bucket, silence);
    case DoneWait::kTimedOut:
      break;
  }
  return TimedOut(step, bucket, timeout);
}

absl::Status StepClient::AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned) {
  const std::uint64_t last_void = words_.LastVoid();
  const bool is_void = last_void == step;
  // A later step is void, so this one is decided. Its word does not say how, but its StepDone does.
  const bool decided = last_void > step;
  absl::MutexLock lock(&mutex_);
  if (is_void || decided || poisoned) {
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return progress_.Settled(step); };
    mutex_.AwaitWithTimeout(absl::Condition(&settled), kVerdictTimeout);
  }
  if (const auto verdict = progress_.Verdict(step); verdict != nullptr) return verdict->status;
  if (!progress_.end().ok()) return progress_.EndOf(step);
  if (poisoned || is_void) {
    return errors_.VoidStepError(step, bucket);
  }
  // This thread woke up so late that the step's verdict is not kept any more. The step may have
  // been void, because void_step holds only the last void step.
  if (step <= progress_.last_decided()) {
    return errors_.Make(
        absl::StatusCode::kFailedPrecondition, reason::kStaleStep, step, bucket,
        absl::StrCat("it was decided too long ago, and its verdict is not kept; the next step is ",
                     next_step()));
  }
  if (decided) {
    return errors_.Make(absl::StatusCode::kUnavailable, reason::kDaemonSilent, step, bucket,
                        absl::StrCat("the daemon has not sent the verdict of step ", step,
                                     " within ", DurationText(kVerdictTimeout), ", although step ",
                                     last_void, " is void already; waits can be repeated"));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepClient::WaitStep(std::uint64_t step, absl::Duration timeout) {
  absl::StatusOr<StepResult> result = absl::UnknownError("");
  Pinned(timeout, [&] { return Goes((result = AwaitStep(step, timeout)).status()); });
  return result;
}

absl::StatusOr<StepResult> StepClient::AwaitStep(std::uint64_t step, absl::Duration timeout) {
  std::shared_ptr<const StepVerdict> verdict;
  std::shared_ptr<Restoration> restoration;
  DaemonSilence silence(*connection_);
  Awaited awaited = Awaited::kMet;
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = progress_.AdmitWait(step, "WaitStep"); !status.ok()) return status;
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return progress_.Settled(step); };
    const absl::Time deadline = absl::Now() + timeout;
    awaited = AwaitUnlessSilent(&mutex_, absl::Condition(&settled), QuestionTime(deadline, timeout),
                                &silence);
    if (awaited == Awaited::kTimedOut && AskWhoIsLateLocked(step, timeout)) {
      awaited = AwaitUnlessSilent(&mutex_, absl::Condition(&settled), deadline, &silence);
    }
    // A verdict counts, also if the session has ended since.
    verdict = progress_.Verdict(step);
    if (restoration_ != nullptr && restoration_->step() == step) restoration = restoration_;
    if (verdict == nullptr) {
      if (auto status = progress_.CheckUndecided(step); !status.ok()) return status;
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
  if (auto status = progress_.AdmitWait(step, "WaitOnStream"); !status.ok()) return status;
  const auto verdict = progress_.Verdict(step);
  if (verdict != nullptr && !verdict->status.ok()) return verdict->status;
  if (verdict == nullptr || !progress_.end().ok()) {
    if (auto status = progress_.CheckUndecided(step); !status.ok()) return status;
  }
  const std::size_t begin = bucket.value_or(0);
  const std::size_t end = bucket.has_value() ? begin + 1 : bucket_count_;
  for (std::size_t i = begin; i < end; ++i) {
    if (step == next_step() && !progress_.open().marked(i)) {
      return errors_.Make(
          absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation, step, i,
          "WaitOnStream of a bucket that was not marked ready; mark it first, or the "
          "stream may wait forever");
    }
    if (!words_.Released(i, step)) waited->push_back(i);
  }
  return absl::OkStatus();
}

absl::Status StepClient::Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                                const DaemonSilence& silence) const {
  return errors_.Make(absl::StatusCode::kUnavailable, reason::kDaemonSilent, step, bucket,
                      absl::StrCat(silence.Description(), "; waits can be repeated"));
}

bool StepClient::AskWhoIsLate(std::uint64_t step, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  return AskWhoIsLateLocked(step, timeout);
}

bool StepClient::AskWhoIsLateLocked(std::uint64_t step, absl::Duration timeout) {
  // A poll (timeout 0) must return at once, and comes often: it asks nothing.
  if (timeout <= absl::ZeroDuration()) return false;
  v1::SessionRequest request;
  request.mutable_query_step()->set_channel(channel_);
  if (late_ranks_.Ask(step, request.mutable_query_step())) {
    connection_->stream().Send(std::move(request));
  }
  return true;
}

absl::Status StepClient::TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                                  absl::Duration timeout) {
  std::string late = LateRanksQuestion::kUnanswered;
  if (timeout > absl::ZeroDuration()) {
    absl::MutexLock lock(&mutex_);
    const auto answered = [this, step]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return late_ranks_.answered() || progress_.Settled(step);
    };
    mutex_.AwaitWithTimeout(absl::Condition(&answered), kLateAnswer);
    late = late_ranks_.Answer();
  }
  return errors_.Make(absl::StatusCode::kDeadlineExceeded, reason::kWaitTimeout, step, bucket,
                      absl::StrCat("not done within ", DurationText(timeout), ": ", late));
}

// ---- The daemon's messages ----------------------------------------------------------------------

void StepClient::OnStepDone(const v1::StepDone& done) {
  auto verdict = std::make_shared<StepVerdict>(DecodeVerdict(done, gradients_.size()));
  if (done.verdict() != v1::VERDICT_COMPLETE && verdict->status.ok()) {
    verdict->status = errors_.VoidStepError(done.step(), std::nullopt);
  }
  const bool complete = verdict->status.ok();

  absl::MutexLock lock(&mutex_);
  if (done.step() <= progress_.last_decided()) return;
  counters_.CountVerdict(done.step(), complete);
  // Gradients that no rank used are put back; the trainer redoes those of a void step, of which
  // TakeHeld() keeps none. An earlier step's restoration stays, because it may be waited for after
  // another rank abandoned this one.
  auto held = progress_.open().TakeHeld(verdict->result.used);
  if (!held.empty()) {
    restoration_ = std::make_shared<Restoration>(done.step(), std::move(held));
  }
  progress_.Decide(std::move(verdict));
}

void StepClient::OnResume(std::uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (progress_.Resume(step)) restoration_.reset();
}

void StepClient::OnStepState(const v1::StepState& state) {
  absl::MutexLock lock(&mutex_);
  late_ranks_.OnAnswer(state);
}

void StepClient::OnSessionEnd(const absl::Status& end) {
  words_.Poison(next_step());
  absl::MutexLock lock(&mutex_);
  if (progress_.SetEnd(end)) progress_.open().DropHeld();
}

}  // namespace gradsync::client
