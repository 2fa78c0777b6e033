#include "client/src/step_sequence.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/done_wait.h"
#include "client/src/error.h"
#include "client/src/utf8.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

constexpr std::size_t kMaxReasonBytes = 1024;
// EndStep.ready_rest; a daemon that speaks less would not see it.
constexpr std::uint32_t kReadyRestProtocol = 3;
constexpr absl::Duration kQueryTimeout = absl::Seconds(1);
// StepDone is on its way when the void word is seen, and so is the session's end when a poisoned
// one is.
constexpr absl::Duration kVerdictTimeout = absl::Seconds(10);
// A GPU wakes no futex.
constexpr absl::Duration kDeviceWordPeriod = absl::Microseconds(200);

bool AllZero(const std::byte* data, std::size_t bytes) {
  return bytes == 0 || (data[0] == std::byte{0} && std::memcmp(data, data + 1, bytes - 1) == 0);
}

// Empty when every parameter is used.
std::string UsedMap(const std::vector<bool>& used) {
  if (std::find(used.begin(), used.end(), false) == used.end()) return "";
  std::string map((used.size() + 7) / 8, '\0');
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (used[i]) map[i / 8] = static_cast<char>(map[i / 8] | (1 << (i % 8)));
  }
  return map;
}

// The union must cover every parameter; anything else means all.
std::vector<bool> UsedFlags(const std::string& map, std::size_t parameters) {
  if (map.size() != (parameters + 7) / 8) return {};
  std::vector<bool> used(parameters);
  for (std::size_t i = 0; i < parameters; ++i) {
    used[i] = ((static_cast<unsigned char>(map[i / 8]) >> (i % 8)) & 1) != 0;
  }
  return used;
}

}  // namespace

StepSequence::StepSequence(std::shared_ptr<Connection> connection, std::uint32_t channel,
                           std::string name, const LayoutPlan& plan,
                           std::shared_ptr<std::byte> arena,
                           std::shared_ptr<MappedMemory> semaphores,
                           std::unique_ptr<StreamHandoff> handoff)
    : connection_(std::move(connection)),
      channel_(channel),
      name_(std::move(name)),
      bucket_count_(plan.buckets.size()),
      gradients_(plan.gradients),
      on_device_(handoff != nullptr),
      max_outstanding_(on_device_ ? kMaxOutstanding : 1),
      arena_(std::move(arena)),
      semaphores_(std::move(semaphores)),
      handoff_(std::move(handoff)),
      marked_(plan.buckets.size()),
      unused_(plan.gradients.size()) {
  for (const PlannedSpan& bucket : plan.buckets) {
    reduced_bytes_ += bucket.count * ItemSize(bucket.dtype);
  }
  last_marks_.fill(absl::InfinitePast());
}

void StepSequence::Begin(std::uint64_t first_step) {
  absl::MutexLock lock(&mutex_);
  // A rank that was quicker may have abandoned the first step already.
  if (last_step_ > 0) return;
  last_step_ = first_step - 1;
  next_step_.store(first_step, std::memory_order_release);
}

absl::Status StepSequence::CheckClosed(absl::string_view call) const {
  absl::MutexLock lock(&mutex_);
  return CheckClosedLocked(call);
}

absl::Status StepSequence::CheckClosedLocked(absl::string_view call) const {
  const std::uint64_t undecided = last_step_ + 1;
  if (marks_ == 0 && unused_count_ == 0 && phase_ == Phase::kMarking && undecided == next_step()) {
    return absl::OkStatus();
  }
  return Error(
      absl::StatusCode::kFailedPrecondition, kProtocolViolation, undecided, std::nullopt,
      absl::StrCat(call, " while this step is open; end or abandon it and wait for it first"));
}

// ---- Replacement
// ---------------------------------------------------------------------------------

absl::Status StepSequence::BeginReplacement() {
  absl::MutexLock lock(&mutex_);
  if (!end_.ok()) return end_;
  if (replacing_) return BeingReplaced(next_step(), "ReplaceLayout");
  if (auto status = CheckClosedLocked("ReplaceLayout"); !status.ok()) return status;
  replacing_ = true;
  return absl::OkStatus();
}

void StepSequence::ReplacementFailed() {
  absl::MutexLock lock(&mutex_);
  replacing_ = false;
}

void StepSequence::Replaced() {
  OnSessionEnd(Error(absl::StatusCode::kFailedPrecondition, kLayoutReplaced, next_step(),
                     std::nullopt,
                     "the layout was replaced; use the one that ReplaceLayout returned"));
}

absl::Status StepSequence::BeingReplaced(std::uint64_t step, absl::string_view call) const {
  return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, std::nullopt,
               absl::StrCat(call, " while the layout is being replaced; wait for ReplaceLayout"));
}

// ---- Errors
// --------------------------------------------------------------------------------------

absl::Status StepSequence::Error(absl::StatusCode code, absl::string_view reason,
                                 std::uint64_t step, std::optional<std::size_t> bucket,
                                 absl::string_view what) const {
  ErrorFields fields = connection_->Fields();
  fields.channel = channel_;
  fields.step = step;
  fields.bucket = bucket;
  return MakeError(
      code, reason,
      absl::StrCat("layout '", name_, "', rank ", connection_->options().rank, ", step ", step,
                   bucket.has_value() ? absl::StrCat(", bucket ", *bucket) : "", ": ", what),
      fields);
}

absl::Status StepSequence::UnknownBucket(std::uint64_t step, std::size_t bucket) const {
  return Error(absl::StatusCode::kInvalidArgument, kUnknownBucket, step, bucket,
               absl::StrCat("there is no such bucket; the layout has ", bucket_count_));
}

absl::Status StepSequence::Stale(std::uint64_t step) const {
  return Error(absl::StatusCode::kFailedPrecondition, kStaleStep, step, std::nullopt,
               absl::StrCat("it is decided already; the next one is ", next_step()));
}

absl::Status StepSequence::Ahead(std::uint64_t step, absl::string_view call) const {
  return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, std::nullopt,
               absl::StrCat(call, " ahead of the step to run now, ", next_step()));
}

bool StepSequence::MaybeDecided(std::uint64_t step) const {
  if (step <= last_step_) return false;
  return step <= ended_step_ || (on_device_ && step == next_step() && marks_ == bucket_count_);
}

absl::Status StepSequence::EndOf(std::uint64_t step) const {
  if (!MaybeDecided(step) || ErrorReason(end_) != kDaemonLost) return end_;
  return Error(
      absl::StatusCode::kUnavailable, kStepInDoubt, step, std::nullopt,
      absl::StrCat(step <= ended_step_ ? "EndStep was sent" : "every bucket was marked ready",
                   ", and the daemon was lost before its verdict came: the "
                   "step may be complete or void on other ranks; join again and compare "
                   "the last committed step. ",
                   end_.message()));
}

absl::Status StepSequence::Admit(std::uint64_t step, absl::string_view call) const {
  if (!end_.ok()) return EndOf(step);
  if (step < next_step()) {
    if (const auto verdict = VerdictOf(step); verdict != nullptr && !verdict->status.ok()) {
      return verdict->status;
    }
    return step > last_step_ ? Ended(step, call, "EndStep") : Stale(step);
  }
  if (connection_->left()) {
    return Error(absl::StatusCode::kFailedPrecondition, kLeft, step, std::nullopt,
                 absl::StrCat(call, " after this rank has left"));
  }
  if (step > next_step()) return Ahead(step, call);
  if (replacing_) return BeingReplaced(step, call);
  if (phase_ == Phase::kEnded) return Ended(step, call, "EndStep");
  if (phase_ == Phase::kAbandoned) return Ended(step, call, "AbandonStep");
  if (step > last_step_ + max_outstanding_) {
    return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, std::nullopt,
                 absl::StrCat(call, " while ", max_outstanding_,
                              " steps are under way; first wait "
                              "for the verdict of step ",
                              last_step_ + 1, " with WaitStep"));
  }
  return absl::OkStatus();
}

absl::Status StepSequence::Ended(std::uint64_t step, absl::string_view call,
                                 absl::string_view by) const {
  return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, std::nullopt,
               absl::StrCat(call, " after this rank's ", by));
}

std::shared_ptr<const StepSequence::Verdict> StepSequence::VerdictOf(std::uint64_t step) const {
  const auto& verdict = verdicts_[step % kKeptVerdicts];
  return verdict != nullptr && verdict->step == step ? verdict : nullptr;
}

absl::Status StepSequence::CheckInHostMemory(std::uint64_t step, absl::string_view call) const {
  if (!on_device_) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, kMalformed, step, std::nullopt,
               absl::StrCat(call,
                            " without streams, but the layout is on a GPU; say on which "
                            "streams its gradients are written"));
}

absl::Status StepSequence::CheckOnDevice(std::uint64_t step, absl::string_view call) const {
  if (on_device_) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, kMalformed, step, std::nullopt,
               absl::StrCat(call,
                            " with a stream, but the layout is in host memory; register it "
                            "with a device"));
}

absl::Status StepSequence::OnDevice(const absl::Status& status, std::uint64_t step,
                                    std::optional<std::size_t> bucket) const {
  if (status.ok()) return status;
  return Error(status.code(), ErrorReason(status), step, bucket, status.message());
}

// ---- The trainer's calls
// -------------------------------------------------------------------------

absl::Status StepSequence::MarkUnused(std::uint64_t step, std::size_t parameter) {
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = Admit(step, "MarkUnused"); !status.ok()) return status;
    if (parameter >= gradients_.size()) {
      return Error(absl::StatusCode::kInvalidArgument, kUnknownParameter, step, std::nullopt,
                   absl::StrCat("there is no parameter ", parameter, "; the layout has ",
                                gradients_.size()));
    }
    const std::uint32_t bucket = gradients_[parameter].bucket;
    if (marked_[bucket]) {
      return Error(absl::StatusCode::kFailedPrecondition, kAlreadyReady, step, bucket,
                   absl::StrCat("parameter ", parameter,
                                " marked unused after its bucket was marked ready"));
    }
    if (unused_[parameter]) return absl::OkStatus();
    unused_[parameter] = true;
    ++unused_count_;
  }
  // On a GPU it is filled in the order of the stream that the bucket is marked with.
  if (on_device_) return absl::OkStatus();
  // Gradients may be large: not under the lock. The bucket is still the trainer's.
  const PlannedSpan& gradient = gradients_[parameter];
  std::byte* const data = arena_.get() + gradient.offset;
  const std::size_t bytes = gradient.count * ItemSize(gradient.dtype);
  if (AllZero(data, bytes)) return absl::OkStatus();
  HeldGradient held{parameter, {data, data + bytes}};
  std::memset(data, 0, bytes);
  absl::MutexLock lock(&mutex_);
  if (step == next_step() && end_.ok()) held_.push_back(std::move(held));
  return absl::OkStatus();
}

absl::Status StepSequence::MarkReady(std::uint64_t step, std::size_t bucket) {
  const absl::Time start = absl::Now();
  if (auto status = CheckInHostMemory(step, "MarkReady"); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitMark(step, bucket); !status.ok()) return status;
  SendMark(step, bucket, start);
  return absl::OkStatus();
}

absl::Status StepSequence::MarkReady(std::uint64_t step, std::size_t bucket,
                                     absl::Span<const CudaStream> streams) {
  const absl::Time start = absl::Now();
  if (auto status = CheckOnDevice(step, "MarkReady"); !status.ok()) return status;
  absl::MutexLock handoff(&handoff_mutex_);
  std::vector<ByteSpan> zeros;
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = AdmitMark(step, bucket); !status.ok()) return status;
    AddUnused(bucket, &zeros);
  }
  if (auto status = OnDevice(handoff_->EnqueueReady(step, {bucket}, zeros, streams), step, bucket);
      !status.ok()) {
    return status;
  }
  absl::MutexLock lock(&mutex_);
  // The step may be void by now, or the session over.
  if (auto status = AdmitMark(step, bucket); !status.ok()) return status;
  SendMark(step, bucket, start);
  return absl::OkStatus();
}

absl::Status StepSequence::AdmitMark(std::uint64_t step, std::size_t bucket) const {
  if (auto status = Admit(step, "MarkReady"); !status.ok()) return status;
  if (bucket >= bucket_count_) return UnknownBucket(step, bucket);
  if (!marked_[bucket]) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, kAlreadyReady, step, bucket,
               "marked ready a second time in this step");
}

void StepSequence::SendMark(std::uint64_t step, std::size_t bucket, absl::Time start) {
  NoteMark(bucket);
  // Under the lock, so that EndStep cannot overtake it.
  connection_->stream().SendBucketReady(channel_, step, static_cast<std::uint32_t>(bucket));
  CountMarks(step, 1, start);
}

void StepSequence::AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const {
  if (unused_count_ == 0) return;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const PlannedSpan& gradient = gradients_[i];
    if (!unused_[i] || gradient.bucket != bucket) continue;
    spans->push_back({gradient.offset, gradient.count * ItemSize(gradient.dtype)});
  }
}

void StepSequence::NoteMark(std::size_t bucket) {
  marked_[bucket] = true;
  // The step before was not waited for: its gradients are being overwritten.
  if (++marks_ == 1) restoration_.reset();
}

void StepSequence::CountMarks(std::uint64_t step, std::size_t marks, absl::Time start) {
  const absl::Time now = absl::Now();
  last_mark(step) = now;
  SessionCounters& counters = connection_->counters();
  counters.buckets_marked.fetch_add(marks, std::memory_order_relaxed);
  counters.mark_ready_ns.fetch_add(absl::ToInt64Nanoseconds(now - start),
                                   std::memory_order_relaxed);
}

absl::Status StepSequence::EndStep(std::uint64_t step, const std::vector<bool>& used) {
  absl::MutexLock lock(&mutex_);
  if (auto status = Admit(step, "EndStep"); !status.ok()) return status;
  if (marks_ < bucket_count_) {
    const auto first = std::find(marked_.begin(), marked_.end(), false) - marked_.begin();
    return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, first,
                 "EndStep, but this bucket was not marked ready");
  }
  if (auto status = CheckUsed(step, used, "EndStep"); !status.ok()) return status;
  SendEndStep(step, used, /*ready_rest=*/false);
  return absl::OkStatus();
}

absl::Status StepSequence::FinishStep(std::uint64_t step, const std::vector<bool>& used) {
  const absl::Time start = absl::Now();
  if (auto status = CheckInHostMemory(step, "FinishStep"); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  if (auto status = AdmitFinish(step, used); !status.ok()) return status;
  MarkRestAndEnd(step, used, start);
  return absl::OkStatus();
}

absl::Status StepSequence::FinishStep(std::uint64_t step, const std::vector<bool>& used,
                                      absl::Span<const CudaStream> streams) {
  const absl::Time start = absl::Now();
  if (auto status = CheckOnDevice(step, "FinishStep"); !status.ok()) return status;
  absl::MutexLock handoff(&handoff_mutex_);
  std::vector<std::size_t> rest;
  std::vector<ByteSpan> zeros;
  {
    absl::MutexLock lock(&mutex_);
    if (auto status = AdmitFinish(step, used); !status.ok()) return status;
    for (std::size_t i = 0; i < bucket_count_; ++i) {
      if (marked_[i]) continue;
      rest.push_back(i);
      AddUnused(i, &zeros);
    }
  }
  if (!rest.empty()) {
    if (auto status =
            OnDevice(handoff_->EnqueueReady(step, rest, zeros, streams), step, std::nullopt);
        !status.ok()) {
      return status;
    }
  }
  absl::MutexLock lock(&mutex_);
  // The step may be void by now, or the session over.
  if (auto status = AdmitFinish(step, used); !status.ok()) return status;
  MarkRestAndEnd(step, used, start);
  return absl::OkStatus();
}

absl::Status StepSequence::AdmitFinish(std::uint64_t step, const std::vector<bool>& used) const {
  if (auto status = Admit(step, "FinishStep"); !status.ok()) return status;
  return CheckUsed(step, used, "FinishStep");
}

void StepSequence::MarkRestAndEnd(std::uint64_t step, const std::vector<bool>& used,
                                  absl::Time start) {
  const std::size_t rest = bucket_count_ - marks_;
  const bool ready_rest = rest > 0 && connection_->protocol() >= kReadyRestProtocol;
  for (std::size_t i = 0; i < bucket_count_; ++i) {
    if (marked_[i]) continue;
    NoteMark(i);
    if (!ready_rest) {
      connection_->stream().SendBucketReady(channel_, step, static_cast<std::uint32_t>(i));
    }
  }
  if (rest > 0) CountMarks(step, rest, start);
  SendEndStep(step, used, ready_rest);
}

absl::Status StepSequence::CheckUsed(std::uint64_t step, const std::vector<bool>& used,
                                     absl::string_view call) const {
  if (used.empty() || used.size() == gradients_.size()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, kMalformed, step, std::nullopt,
               absl::StrCat(call, " says of ", used.size(), " parameters whether they are used; ",
                            "the layout has ", gradients_.size()));
}

void StepSequence::SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest) {
  std::vector<bool> also_used = used;
  if (unused_count_ > 0) {
    if (also_used.empty()) also_used.assign(gradients_.size(), true);
    for (std::size_t i = 0; i < unused_.size(); ++i) {
      if (unused_[i]) also_used[i] = false;
    }
  }
  v1::SessionRequest request;
  request.mutable_end_step()->set_channel(channel_);
  request.mutable_end_step()->set_step(step);
  request.mutable_end_step()->set_used_map(UsedMap(also_used));
  request.mutable_end_step()->set_ready_rest(ready_rest);
  phase_ = Phase::kEnded;
  ended_step_ = step;
  connection_->stream().Send(std::move(request));
  if (on_device_) BeginMarking(step + 1);
}

void StepSequence::BeginMarking(std::uint64_t step) {
  phase_ = Phase::kMarking;
  marked_.assign(bucket_count_, false);
  marks_ = 0;
  if (unused_count_ > 0) unused_.assign(gradients_.size(), false);
  unused_count_ = 0;
  held_.clear();
  next_step_.store(step, std::memory_order_release);
}

absl::Status StepSequence::AbandonStep(std::uint64_t step, absl::string_view reason) {
  absl::MutexLock lock(&mutex_);
  // What the caller wants is so already.
  const auto verdict = VerdictOf(step);
  if (end_.ok() && verdict != nullptr && !verdict->status.ok()) return absl::OkStatus();
  if (end_.ok() && step == next_step() && phase_ == Phase::kAbandoned) return absl::OkStatus();
  if (auto status = Admit(step, "AbandonStep"); !status.ok()) return status;
  v1::SessionRequest request;
  request.mutable_abandon_step()->set_channel(channel_);
  request.mutable_abandon_step()->set_step(step);
  request.mutable_abandon_step()->set_reason(ValidUtf8(reason.substr(0, kMaxReasonBytes)));
  phase_ = Phase::kAbandoned;
  connection_->stream().Send(std::move(request));
  return absl::OkStatus();
}

absl::Status StepSequence::WaitBucket(std::uint64_t step, std::size_t bucket,
                                      absl::Duration timeout) {
  if (bucket >= bucket_count_) return UnknownBucket(step, bucket);
  {
    absl::MutexLock lock(&mutex_);
    if (step > next_step()) return end_.ok() ? Ahead(step, "WaitBucket") : end_;
    if (const auto verdict = VerdictOf(step); verdict != nullptr) return verdict->status;
    if (!end_.ok()) return EndOf(step);
    if (step <= last_step_) return Stale(step);
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

absl::Status StepSequence::AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned) {
  // Stored before the done word that was seen.
  const bool is_void = header().void_step.load(std::memory_order_acquire) == step;
  absl::MutexLock lock(&mutex_);
  if (is_void || poisoned) {
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return Settled(step); };
    mutex_.AwaitWithTimeout(absl::Condition(&settled), kVerdictTimeout);
  }
  if (const auto verdict = VerdictOf(step); verdict != nullptr) return verdict->status;
  if (!end_.ok()) return EndOf(step);
  if (poisoned || is_void) {
    return Error(absl::StatusCode::kAborted, kStepVoid, step, bucket,
                 "the step is void; the daemon has not said why");
  }
  // This thread woke up late: the step is decided, and so are others after it, whose verdicts alone
  // are kept. It may have been void, and void_step names the last void step only.
  if (step <= last_step_) {
    return Error(absl::StatusCode::kFailedPrecondition, kStaleStep, step, bucket,
                 absl::StrCat("it is decided, and its verdict is no longer kept; the next one is ",
                              next_step()));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepSequence::WaitStep(std::uint64_t step, absl::Duration timeout) {
  std::shared_ptr<const Verdict> verdict;
  std::shared_ptr<Restoration> restoration;
  DaemonSilence silence(*connection_);
  Awaited awaited = Awaited::kMet;
  {
    absl::MutexLock lock(&mutex_);
    if (step > next_step()) return end_.ok() ? Ahead(step, "WaitStep") : end_;
    const auto settled = [this, step]()
                             ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return Settled(step); };
    awaited =
        AwaitUnlessSilent(&mutex_, absl::Condition(&settled), absl::Now() + timeout, &silence);
    // Decided is decided, also if the session has ended since.
    verdict = VerdictOf(step);
    if (restoration_ != nullptr && restoration_->step == step) restoration = restoration_;
    if (verdict == nullptr) {
      if (!end_.ok()) return EndOf(step);
      if (step <= last_step_) return Stale(step);
    }
  }
  if (verdict == nullptr) {
    return awaited == Awaited::kSilent ? Silent(step, std::nullopt, silence)
                                       : TimedOut(step, std::nullopt, timeout);
  }
  if (!verdict->status.ok()) return verdict->status;
  if (restoration != nullptr) Restore(restoration.get());
  return verdict->result;
}

absl::Status StepSequence::WaitOnStream(std::uint64_t step, std::optional<std::size_t> bucket,
                                        CudaStream stream) {
  if (auto status = CheckOnDevice(step, "WaitOnStream"); !status.ok()) return status;
  if (bucket.has_value() && *bucket >= bucket_count_) return UnknownBucket(step, *bucket);
  absl::MutexLock handoff(&handoff_mutex_);
  std::vector<std::size_t> waited;
  {
    absl::MutexLock lock(&mutex_);
    if (step > next_step()) return end_.ok() ? Ahead(step, "WaitOnStream") : end_;
    const auto verdict = VerdictOf(step);
    if (verdict != nullptr && !verdict->status.ok()) return verdict->status;
    if (!end_.ok()) return EndOf(step);
    if (verdict == nullptr && step <= last_step_) return Stale(step);
    const std::size_t begin = bucket.value_or(0);
    const std::size_t end = bucket.has_value() ? begin + 1 : bucket_count_;
    for (std::size_t i = begin; i < end; ++i) {
      if (step == next_step() && !marked_[i]) {
        return Error(absl::StatusCode::kFailedPrecondition, kProtocolViolation, step, i,
                     "WaitOnStream of a bucket that was not marked ready; the mark might come to "
                     "lie behind the wait");
      }
      if (!SemaphoreReleased(semaphore(i).done.load(std::memory_order_acquire), step)) {
        waited.push_back(i);
      }
    }
  }
  return OnDevice(handoff_->EnqueueWait(step, waited, stream), step, bucket);
}

void StepSequence::CloseHandoff() {
  absl::MutexLock handoff(&handoff_mutex_);
  if (handoff_ == nullptr) return;
  {
    absl::MutexLock lock(&mutex_);
    KeepPoisoned();
    handoff_closed_ = true;
  }
  handoff_.reset();  // waits for the streams
  std::unique_ptr<PoisonKeeper> keeper;
  absl::MutexLock lock(&mutex_);
  keeper.swap(poison_keeper_);
}

void StepSequence::Restore(Restoration* restoration) const {
  absl::call_once(restoration->once, [&] {
    for (const HeldGradient& gradient : restoration->gradients) {
      std::memcpy(arena_.get() + gradients_[gradient.parameter].offset, gradient.bytes.data(),
                  gradient.bytes.size());
    }
    restoration->gradients.clear();
  });
}

absl::Status StepSequence::Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                                  const DaemonSilence& silence) const {
  return Error(absl::StatusCode::kUnavailable, kDaemonSilent, step, bucket,
               absl::StrCat(silence.Description(), "; waits can be repeated"));
}

absl::Status StepSequence::TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                                    absl::Duration timeout) {
  std::string missing = "the daemon has not said who is missing";
  // A poll wants an answer at once, and asks often.
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
  return Error(absl::StatusCode::kDeadlineExceeded, kWaitTimeout, step, bucket,
               absl::StrCat("not done within ", absl::FormatDuration(timeout), ": ", missing));
}

// ---- The daemon's messages
// -----------------------------------------------------------------------

void StepSequence::OnStepDone(const v1::StepDone& done) {
  auto verdict = std::make_shared<Verdict>();
  verdict->step = done.step();
  if (done.verdict() != v1::VERDICT_COMPLETE) {
    verdict->status = StatusFromProto(done.status());
    if (verdict->status.ok()) {
      verdict->status = Error(absl::StatusCode::kAborted, kStepVoid, done.step(), std::nullopt,
                              "the step is void; the daemon has not said why");
    }
  }
  StepResult& result = verdict->result;
  result.step = done.step();
  result.live_ranks = done.live_ranks();
  result.divisor = done.divisor();
  if (!done.used_map().empty()) result.used = UsedFlags(done.used_map(), gradients_.size());
  result.buckets.reserve(static_cast<std::size_t>(done.buckets_size()));
  for (const v1::BucketTimes& times : done.buckets()) {
    result.buckets.push_back(
        {{times.ready_ns().begin(), times.ready_ns().end()}, times.start_ns(), times.finish_ns()});
  }
  // A daemon of before these fields sends none.
  const int measured = std::min(done.sum_of_squares_size(), done.non_finite_size());
  for (int i = 0; i < measured; ++i) {
    result.numbers.push_back({done.sum_of_squares(i), done.non_finite(i)});
  }

  SessionCounters& counters = connection_->counters();
  absl::MutexLock lock(&mutex_);
  if (done.step() <= last_step_) return;
  if (verdict->status.ok()) {
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
  // Gradients that no rank has used are put back; those of a void step are the trainer's to redo.
  // What there is to put back of an earlier step stays, for that may be waited for after a later
  // one was abandoned elsewhere.
  const auto used_by_some = [&](const HeldGradient& gradient) {
    return verdict->result.used.empty() || verdict->result.used[gradient.parameter];
  };
  held_.erase(std::remove_if(held_.begin(), held_.end(), used_by_some), held_.end());
  if (verdict->status.ok() && !held_.empty()) {
    restoration_ = std::make_shared<Restoration>();
    restoration_->step = done.step();
    restoration_->gradients = std::move(held_);
  }
  last_step_ = done.step();
  // This rank took part in a complete step, and has done with the ones before.
  for (auto& kept : verdicts_) {
    const bool past = kept != nullptr && kept->step + max_outstanding_ <= done.step();
    if (past && verdict->status.ok()) kept = nullptr;
  }
  verdicts_[last_step_ % kKeptVerdicts] = std::move(verdict);
  if (next_step() <= last_step_) BeginMarking(last_step_ + 1);
}

void StepSequence::OnResume(std::uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step <= next_step()) return;
  // The others have decided steps without this rank.
  last_step_ = step - 1;
  verdicts_.fill(nullptr);
  restoration_.reset();
  next_step_.store(step, std::memory_order_release);
}

void StepSequence::OnStepState(const v1::StepState& state) {
  absl::MutexLock lock(&mutex_);
  if (state.step() == asked_step_) missing_ = state.missing();
  asked_step_ = 0;
}

void StepSequence::OnSessionEnd(const absl::Status& end) {
  Poison();
  absl::MutexLock lock(&mutex_);
  if (!end_.ok()) return;
  end_ = end;
  held_.clear();
  if (on_device_ && !handoff_closed_) KeepPoisoned();
}

void StepSequence::KeepPoisoned() {
  if (poison_keeper_ != nullptr) return;
  poison_keeper_ = std::make_unique<PoisonKeeper>(&semaphore(0), bucket_count_, next_step());
}

void StepSequence::Poison() const {
  for (std::size_t i = 0; i < bucket_count_; ++i) {
    PoisonDone(&semaphore(i).done, next_step());
  }
}

}  // namespace gradsync::client
