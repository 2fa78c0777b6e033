#include "client/src/step_progress.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/error.h"

namespace gradsync::client {

StepProgress::StepProgress(const Connection& connection, const StepErrors& errors,
                           std::size_t buckets, std::size_t parameters, bool on_device)
    : connection_(connection),
      errors_(errors),
      buckets_(buckets),
      parameters_(parameters),
      on_device_(on_device),
      max_outstanding_(on_device ? kMaxOutstanding : 1),
      open_(buckets, parameters),
      decided_(max_outstanding_) {}

// ---- Transitions --------------------------------------------------------------------------------

void StepProgress::Begin(std::uint64_t first_step) {
  first_step_ = first_step;
  if (decided_.last() > 0) return;
  decided_.SkipTo(first_step - 1);
  next_step_.store(first_step, std::memory_order_release);
}

bool StepProgress::Resume(std::uint64_t next_step) {
  if (next_step <= this->next_step()) return false;
  decided_.SkipTo(next_step - 1);
  next_step_.store(next_step, std::memory_order_release);
  return true;
}

void StepProgress::EndOpenStep() {
  open_.End();
  ended_step_ = next_step();
  if (on_device_) Open(next_step() + 1);
}

void StepProgress::Decide(std::shared_ptr<const StepVerdict> verdict) {
  const std::uint64_t step = verdict->step;
  decided_.Add(std::move(verdict));
  if (next_step() <= step) Open(step + 1);
}

absl::Status StepProgress::BeginReplacement() {
  if (auto status = CheckMayEnd("ReplaceLayout"); !status.ok()) return status;
  replacing_ = true;
  return absl::OkStatus();
}

bool StepProgress::SetEnd(const absl::Status& end) {
  if (!end_.ok()) return false;
  end_ = end;
  return true;
}

void StepProgress::Open(std::uint64_t step) {
  open_ = OpenStep(buckets_, parameters_);
  next_step_.store(step, std::memory_order_release);
}

// ---- State --------------------------------------------------------------------------------------

bool StepProgress::MaybeDecided(std::uint64_t step) const {
  if (step <= decided_.last()) return false;
  return step <= ended_step_ || (on_device_ && step == next_step() && open_.all_marked());
}

absl::Status StepProgress::EndOf(std::uint64_t step) const {
  if (!MaybeDecided(step) || ErrorReason(end_) != reason::kDaemonLost) return end_;
  return errors_.Make(
      absl::StatusCode::kUnavailable, reason::kStepInDoubt, step, std::nullopt,
      absl::StrCat(step <= ended_step_ ? "EndStep was sent" : "every bucket was marked ready",
                   " and no verdict came before the daemon was lost: the step may be "
                   "complete or void on other ranks. Join again and compare the ranks' last "
                   "steps. ",
                   end_.message()));
}

// ---- Which call fits now ------------------------------------------------------------------------

absl::Status StepProgress::CheckNoOpenStep(absl::string_view call) const {
  const std::uint64_t undecided = decided_.last() + 1;
  if (open_.untouched() && undecided == next_step()) return absl::OkStatus();
  if (!end_.ok()) return end_;  // the session tells its layouts of its end first
  return errors_.OutOfOrderError(
      undecided, call, "while this step is open; end or abandon it and wait for it first");
}

absl::Status StepProgress::CheckMayEnd(absl::string_view call) const {
  if (!end_.ok()) return end_;
  if (replacing_) return BeingReplacedError(next_step(), call);
  return CheckNoOpenStep(call);
}

absl::Status StepProgress::Admit(std::uint64_t step, absl::string_view call) const {
  constexpr absl::string_view kAfterEnd =
      "after this rank had ended the step; mark every bucket ready before you end the step, end it "
      "once, and wait for its verdict with WaitStep before the next one";
  if (!end_.ok()) return EndOf(step);
  if (step < next_step()) {
    if (const auto verdict = decided_.Find(step); verdict != nullptr && !verdict->status.ok()) {
      return verdict->status;
    }
    return step > decided_.last() ? errors_.OutOfOrderError(step, call, kAfterEnd)
                                  : errors_.StaleStepError(step, next_step());
  }
  if (connection_.left()) {
    return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kLeft, step, std::nullopt,
                        absl::StrCat(call, " after this rank has left"));
  }
  if (connection_.loading()) {
    return errors_.OutOfOrderError(
        step, call,
        "before this rank, which takes the place of a lost one, has the state of the model; call "
        "FetchState, load what it returns, and call ConfirmState first");
  }
  if (step > next_step()) return errors_.FutureStepError(step, next_step(), call);
  if (replacing_) return BeingReplacedError(step, call);
  if (open_.ended()) return errors_.OutOfOrderError(step, call, kAfterEnd);
  if (open_.abandoned()) {
    return errors_.OutOfOrderError(
        step, call,
        "after this rank had abandoned the step; wait for its verdict with WaitStep, then "
        "begin the next one");
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

absl::Status StepProgress::AdmitMark(std::uint64_t step, std::size_t bucket) const {
  if (auto status = Admit(step, "MarkReady"); !status.ok()) return status;
  if (bucket >= buckets_) return errors_.UnknownBucketError(step, bucket);
  if (!open_.marked(bucket)) return absl::OkStatus();
  return errors_.Make(absl::StatusCode::kFailedPrecondition, reason::kAlreadyReady, step, bucket,
                      "marked ready a second time in this step");
}

absl::Status StepProgress::AdmitEnd(std::uint64_t step, const std::vector<bool>& used,
                                    absl::string_view call) const {
  if (auto status = Admit(step, call); !status.ok()) return status;
  if (used.empty() || used.size() == parameters_) return absl::OkStatus();
  return errors_.WrongUsedSizeError(step, call, used.size());
}

absl::Status StepProgress::AdmitWait(std::uint64_t step, absl::string_view call) const {
  if (step <= next_step()) return absl::OkStatus();
  return end_.ok() ? errors_.FutureStepError(step, next_step(), call) : end_;
}

absl::Status StepProgress::CheckUndecided(std::uint64_t step) const {
  if (!end_.ok()) return EndOf(step);
  return step > decided_.last() ? absl::OkStatus() : errors_.StaleStepError(step, next_step());
}

absl::Status StepProgress::BeingReplacedError(std::uint64_t step, absl::string_view call) const {
  return errors_.OutOfOrderError(step, call,
                                 "while the layout is being replaced; wait for ReplaceLayout");
}

}  // namespace gradsync::client
