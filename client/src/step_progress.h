// How far a rank is in the steps of one layout, and which calls are allowed now.

#ifndef CLIENT_SRC_STEP_PROGRESS_H_
#define CLIENT_SRC_STEP_PROGRESS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/src/connection.h"
#include "client/src/decided_steps.h"
#include "client/src/open_step.h"
#include "client/src/step_errors.h"

namespace gradsync::client {

// What this rank has said about its steps, what the daemon has decided, and why no more steps
// follow. Sends nothing and waits for nothing.
//
// In host memory one step is under way: the step to mark is the next one to be decided. On a GPU
// two steps may be under way: once this rank has ended the first, it may mark the second.
//
// Thread-compatible, except next_step(), which any thread may call. `call` is the name of the
// trainer's call, for errors.
class StepProgress {
 public:
  // The most steps that any layout may have under way.
  static constexpr std::size_t kMaxOutstanding = 2;

  // `connection` says whether this rank has left. It and `errors` outlive this object.
  StepProgress(const Connection& connection, const StepErrors& errors, std::size_t buckets,
               std::size_t parameters, bool on_device);

  // ---- Transitions

  // Steps count from `first_step`, unless a step is already decided: another rank may have
  // abandoned the first.
  void Begin(std::uint64_t first_step);
  // The other ranks decided the steps before `next_step` without this rank. False if this rank is
  // already there.
  bool Resume(std::uint64_t next_step);
  // This rank has ended the open step: EndStep is sent.
  void EndOpenStep();
  // The verdict of a step after last_decided().
  void Decide(std::shared_ptr<const StepVerdict> verdict);
  // No step begins until the replacement fails. Statuses: those of CheckMayEnd.
  absl::Status BeginReplacement();
  void ReplacementFailed() { replacing_ = false; }
  // The session has ended, or the layout was replaced or released. Only the first call counts;
  // later ones return false.
  bool SetEnd(const absl::Status& end);

  // ---- State

  // As given to Begin.
  std::uint64_t first_step() const { return first_step_; }
  // The step to mark.
  std::uint64_t next_step() const { return next_step_.load(std::memory_order_acquire); }
  // What this rank said about next_step().
  OpenStep& open() { return open_; }
  const OpenStep& open() const { return open_; }
  // 0: none.
  std::uint64_t last_decided() const { return decided_.last(); }
  // Null if `step` is not decided, or its verdict is not kept any more.
  std::shared_ptr<const StepVerdict> Verdict(std::uint64_t step) const {
    return decided_.Find(step);
  }
  bool replacing() const { return replacing_; }
  // OK until SetEnd.
  const absl::Status& end() const { return end_; }
  // Why the session has ended, for a call about `step`: it may be in doubt.
  absl::Status EndOf(std::uint64_t step) const;
  // True if a wait for `step` has its answer: the verdict, or the end.
  bool Settled(std::uint64_t step) const { return decided_.last() >= step || !end_.ok(); }

  // ---- Which call is allowed now

  // FAILED_PRECONDITION if this rank has begun a step that is not decided. If the layout ended
  // within that step: why it ended.
  absl::Status CheckNoOpenStep(absl::string_view call) const;
  // FAILED_PRECONDITION while a step is open, or if the layout has ended or is being replaced.
  absl::Status CheckMayEnd(absl::string_view call) const;
  // OK if `step` is the one to mark, and this rank may still add to it.
  absl::Status Admit(std::uint64_t step, absl::string_view call) const;
  // OK if `bucket` may be marked.
  absl::Status AdmitMark(std::uint64_t step, std::size_t bucket) const;
  // OK if `call` may end the step. `used`: the argument of the call.
  absl::Status AdmitEnd(std::uint64_t step, const std::vector<bool>& used,
                        absl::string_view call) const;
  // OK if `step` has begun, so that it may be waited for.
  absl::Status AdmitWait(std::uint64_t step, absl::string_view call) const;
  // OK if the verdict of `step`, which Verdict() does not have, may still come. After SetEnd:
  // EndOf(step).
  absl::Status CheckUndecided(std::uint64_t step) const;

 private:
  absl::Status BeingReplacedError(std::uint64_t step, absl::string_view call) const;
  // `step` is the one to mark from now on.
  void Open(std::uint64_t step);
  // True if the step may be decided although no verdict has arrived: this rank has ended it or, on
  // a GPU, has marked every bucket, so that a stream may already continue.
  bool MaybeDecided(std::uint64_t step) const;

  // Constant after construction.
  const Connection& connection_;
  const StepErrors& errors_;
  const std::size_t buckets_;
  const std::size_t parameters_;
  const bool on_device_;
  const std::size_t max_outstanding_;  // steps

  std::uint64_t first_step_ = 1;
  std::atomic<std::uint64_t> next_step_{1};
  OpenStep open_;  // the step next_step_
  // The last step that this rank ended; 0: none.
  std::uint64_t ended_step_ = 0;
  DecidedSteps decided_;
  bool replacing_ = false;
  absl::Status end_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_PROGRESS_H_
