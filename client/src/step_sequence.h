// The steps of one layout, seen from one rank: what may be said next, what was decided, and who
// waits for it.

#ifndef CLIENT_SRC_STEP_SEQUENCE_H_
#define CLIENT_SRC_STEP_SEQUENCE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/include/gradsync/client.h"
#include "client/src/connection.h"
#include "client/src/daemon_silence.h"
#include "client/src/layout_plan.h"
#include "client/src/mapped_memory.h"
#include "client/src/poison_keeper.h"
#include "client/src/stream_handoff.h"
#include "gradsync/shared_memory.h"

namespace gradsync::v1 {
class StepDone;
class StepState;
}  // namespace gradsync::v1

namespace gradsync::client {

// Thread-safe. Every call is judged here, against this rank's own state, before it becomes a
// message, so that a trainer's mistake is an error of the call and not the end of the session.
// Statuses: those of Layout.
//
// Owned by the Layout; the Connection refers to it weakly.
//
// In host memory one step is outstanding: what is marked is what is decided next. On a GPU the step
// after that may be marked as soon as this rank has ended the first.
class StepSequence {
 public:
  // Either `arena`, in host memory, or `handoff`.
  StepSequence(std::shared_ptr<Connection> connection, std::uint32_t channel, std::string name,
               const LayoutPlan& plan, std::shared_ptr<std::byte> arena,
               std::shared_ptr<MappedMemory> semaphores, std::unique_ptr<StreamHandoff> handoff);

  // LayoutReady: steps count from `first_step`.
  void Begin(std::uint64_t first_step) ABSL_LOCKS_EXCLUDED(mutex_);

  const Connection* connection() const { return connection_.get(); }
  std::uint32_t channel() const { return channel_; }
  std::uint64_t next_step() const { return next_step_.load(std::memory_order_acquire); }
  // FAILED_PRECONDITION while a step of this rank has begun and is not decided.
  absl::Status CheckClosed(absl::string_view call) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The layout is about to be replaced: no step until that fails. FAILED_PRECONDITION while a step
  // is open, or if it is being replaced or was.
  absl::Status BeginReplacement() ABSL_LOCKS_EXCLUDED(mutex_);
  void ReplacementFailed() ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases every wait.
  void Replaced() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket,
                         absl::Span<const CudaStream> streams)
      ABSL_LOCKS_EXCLUDED(handoff_mutex_, mutex_);
  absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used,
                          absl::Span<const CudaStream> streams)
      ABSL_LOCKS_EXCLUDED(handoff_mutex_, mutex_);
  absl::Status AbandonStep(std::uint64_t step, absl::string_view reason)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WaitBucket(std::uint64_t step, std::size_t bucket, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<StepResult> WaitStep(std::uint64_t step, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // `bucket`: nullopt for all.
  absl::Status WaitOnStream(std::uint64_t step, std::optional<std::size_t> bucket,
                            CudaStream stream) ABSL_LOCKS_EXCLUDED(handoff_mutex_, mutex_);

  // The layout is being destroyed, on a thread of the trainer: releases its parked streams and lets
  // go of the GPU. No call follows but the daemon's messages.
  void CloseHandoff() ABSL_LOCKS_EXCLUDED(handoff_mutex_, mutex_);

  // The daemon's messages, on the stream's thread.
  void OnStepDone(const v1::StepDone& done) ABSL_LOCKS_EXCLUDED(mutex_);
  // LeaveDone: this rank takes part again, from step `next_step` on.
  void OnResume(std::uint64_t next_step) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnStepState(const v1::StepState& state) ABSL_LOCKS_EXCLUDED(mutex_);
  // This side is the survivor: poisons the done words and releases every wait, before it takes any
  // lock.
  void OnSessionEnd(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class Phase : std::uint8_t { kMarking, kEnded, kAbandoned };
  static constexpr std::size_t kMaxOutstanding = 2;
  // While this rank has not waited for a step, others may abandon the ones after it.
  static constexpr std::size_t kKeptVerdicts = 8;
  struct Verdict {
    std::uint64_t step = 0;
    absl::Status status;
    StepResult result;
  };
  // What a gradient held before MarkUnused filled it with zeros.
  struct HeldGradient {
    std::size_t parameter;
    std::vector<std::byte> bytes;
  };
  // Gradients to put back once, before anybody is told that their step is complete.
  struct Restoration {
    std::uint64_t step = 0;
    absl::once_flag once;
    std::vector<HeldGradient> gradients;
  };

  // "layout 'default', rank 1, step 3, bucket 2: what".
  absl::Status Error(absl::StatusCode code, absl::string_view reason, std::uint64_t step,
                     std::optional<std::size_t> bucket, absl::string_view what) const;
  absl::Status CheckClosedLocked(absl::string_view call) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status BeingReplaced(std::uint64_t step, absl::string_view call) const;
  absl::Status UnknownBucket(std::uint64_t step, std::size_t bucket) const;
  absl::Status Stale(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status Ahead(std::uint64_t step, absl::string_view call) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // OK if the step is the one to run now and this rank may still add to it.
  absl::Status Admit(std::uint64_t step, absl::string_view call) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Null if it is not known, or not any more.
  std::shared_ptr<const Verdict> VerdictOf(std::uint64_t step) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status CheckUsed(std::uint64_t step, const std::vector<bool>& used,
                         absl::string_view call) const;
  // FAILED_PRECONDITION or INVALID_ARGUMENT if the layout wants the other form of a call.
  absl::Status CheckInHostMemory(std::uint64_t step, absl::string_view call) const;
  absl::Status CheckOnDevice(std::uint64_t step, absl::string_view call) const;
  // An error of the GPU's, as one of this step.
  absl::Status OnDevice(const absl::Status& status, std::uint64_t step,
                        std::optional<std::size_t> bucket) const;
  // What lies in bucket `bucket` for parameters that were marked unused.
  void AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Nothing of the step to mark next is said yet.
  void BeginMarking(std::uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Ended(std::uint64_t step, absl::string_view call, absl::string_view by) const;
  absl::Status AdmitMark(std::uint64_t step, std::size_t bucket) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status AdmitFinish(std::uint64_t step, const std::vector<bool>& used) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Of a call that began at `start`.
  void SendMark(std::uint64_t step, std::size_t bucket, absl::Time start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MarkRestAndEnd(std::uint64_t step, const std::vector<bool>& used, absl::Time start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A bucket is marked ready now; its message is the caller's.
  void NoteMark(std::size_t bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The last mark's statistics, of a call that began at `start`.
  void CountMarks(std::uint64_t step, std::size_t marks, absl::Time start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Every bucket is marked, or `ready_rest`.
  void SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A daemon may have decided it, whose word of that has not come: this rank has ended it, or its
  // GPU may have told its streams, as one can once every bucket is marked.
  bool MaybeDecided(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Why the session has ended, for somebody who asks about `step`.
  absl::Status EndOf(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // True once waits for `step` have their answer: the verdict or the session's end.
  bool Settled(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return last_step_ >= step || !end_.ok();
  }
  absl::Time& last_mark(std::uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return last_marks_[step % kMaxOutstanding];
  }
  void Restore(Restoration* restoration) const;
  void Poison() const;
  // The same, up to the handoff's end, and also what is written after this.
  void KeepPoisoned() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                      const DaemonSilence& silence) const;
  absl::Status TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                        absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  SemaphorePageHeader& header() const {
    return *reinterpret_cast<SemaphorePageHeader*>(semaphores_->data());
  }
  BucketSemaphore& semaphore(std::size_t bucket) const {
    return reinterpret_cast<BucketSemaphore*>(semaphores_->data() +
                                              sizeof(SemaphorePageHeader))[bucket];
  }

  // Constant after construction.
  const std::shared_ptr<Connection> connection_;
  const std::uint32_t channel_;
  const std::string name_;
  const std::size_t bucket_count_;
  const std::vector<PlannedSpan> gradients_;  // by parameter
  std::uint64_t reduced_bytes_ = 0;           // of a complete step
  const bool on_device_;
  const std::size_t max_outstanding_;       // steps
  const std::shared_ptr<std::byte> arena_;  // null on a GPU
  const std::shared_ptr<MappedMemory> semaphores_;

  // Written under mutex_; read anywhere.
  std::atomic<std::uint64_t> next_step_{1};

  // Held over the driver's calls, which may block behind a parked stream until the session's thread
  // releases it: that thread never takes it.
  mutable absl::Mutex handoff_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  // Null in host memory and after CloseHandoff.
  std::unique_ptr<StreamHandoff> handoff_ ABSL_GUARDED_BY(handoff_mutex_);

  mutable absl::Mutex mutex_;
  // Of the step next_step_, the one to mark.
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kMarking;
  std::vector<bool> marked_ ABSL_GUARDED_BY(mutex_);
  std::size_t marks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<bool> unused_ ABSL_GUARDED_BY(mutex_);  // by parameter
  std::size_t unused_count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<HeldGradient> held_ ABSL_GUARDED_BY(mutex_);
  // The last step for which this rank sent EndStep; 0: none.
  std::uint64_t ended_step_ ABSL_GUARDED_BY(mutex_) = 0;
  // By step % kMaxOutstanding; the infinite past: nothing was marked.
  std::array<absl::Time, kMaxOutstanding> last_marks_ ABSL_GUARDED_BY(mutex_);
  // The last decided step; 0: none.
  std::uint64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
  // By step % kKeptVerdicts; null: none.
  std::array<std::shared_ptr<const Verdict>, kKeptVerdicts> verdicts_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Restoration> restoration_ ABSL_GUARDED_BY(mutex_);  // null: none
  // The answer to a QueryStep.
  std::uint64_t asked_step_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none is asked for
  std::optional<std::string> missing_ ABSL_GUARDED_BY(mutex_);
  bool replacing_ ABSL_GUARDED_BY(mutex_) = false;
  bool handoff_closed_ ABSL_GUARDED_BY(mutex_) = false;
  // On a GPU, from the session's end or the handoff's close to the end of that.
  std::unique_ptr<PoisonKeeper> poison_keeper_ ABSL_GUARDED_BY(mutex_);
  // Of the session, or because the layout was replaced.
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_SEQUENCE_H_
