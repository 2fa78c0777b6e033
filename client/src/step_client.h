// The steps of one layout, seen from one rank: which call fits now, and what waits for a verdict.

#ifndef CLIENT_SRC_STEP_CLIENT_H_
#define CLIENT_SRC_STEP_CLIENT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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
#include "client/src/decided_steps.h"
#include "client/src/held_gradients.h"
#include "client/src/layout_plan.h"
#include "client/src/mapped_memory.h"
#include "client/src/open_step.h"
#include "client/src/poison_keeper.h"
#include "client/src/step_errors.h"
#include "client/src/stream_handoff.h"
#include "gradsync/shared_memory.h"

namespace gradsync::v1 {
class StepDone;
class StepState;
}  // namespace gradsync::v1

namespace gradsync::client {

// Checks every call against what this rank said before, and only then sends a message. So a
// trainer's mistake fails the call and does not end the session.
//
// Thread-safe. The Layout owns it; the Connection refers to it weakly. Statuses: those of Layout.
//
// In host memory one step is under way: the step to mark is the next one to be decided. On a GPU
// the step after it may be marked as soon as this rank has ended the first; DeviceSteps has the
// calls that take streams.
class StepClient {
 public:
  // `arena`: null on a GPU.
  StepClient(std::shared_ptr<Connection> connection, std::uint32_t channel, std::string name,
             const LayoutPlan& plan, std::shared_ptr<std::byte> arena,
             std::shared_ptr<MappedMemory> semaphores);

  // LayoutReady arrived: steps count from `first_step`.
  void Begin(std::uint64_t first_step) ABSL_LOCKS_EXCLUDED(mutex_);

  const Connection* connection() const { return connection_.get(); }
  std::uint32_t channel() const { return channel_; }
  const StepErrors& errors() const { return errors_; }
  std::uint64_t next_step() const { return next_step_.load(std::memory_order_acquire); }
  // FAILED_PRECONDITION if this rank has begun a step that is not decided.
  absl::Status CheckNoOpenStep(absl::string_view call) const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Replacement of the layout: BeginReplacement (ReplacementFailed | Replaced)

  // No step begins until the replacement fails. FAILED_PRECONDITION while a step is open, or if the
  // layout is being replaced already or was.
  absl::Status BeginReplacement() ABSL_LOCKS_EXCLUDED(mutex_);
  void ReplacementFailed() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends every wait.
  void Replaced() ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- The trainer's calls

  absl::Status MarkUnused(std::uint64_t step, std::size_t parameter) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MarkReady(std::uint64_t step, std::size_t bucket) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status EndStep(std::uint64_t step, const std::vector<bool>& used)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FinishStep(std::uint64_t step, const std::vector<bool>& used)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AbandonStep(std::uint64_t step, absl::string_view reason)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WaitBucket(std::uint64_t step, std::size_t bucket, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<StepResult> WaitStep(std::uint64_t step, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- For DeviceSteps: a call on a GPU before and after it puts something on a stream

  // OK if `bucket` may be marked. Adds the spans in it of parameters that were marked unused.
  absl::Status AdmitMark(std::uint64_t step, std::size_t bucket, std::vector<ByteSpan>* zeros) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Marks the bucket, if it still may be. `start`: when the trainer's call began, for statistics.
  absl::Status CommitMark(std::uint64_t step, std::size_t bucket, absl::Time start)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for FinishStep. `rest`: the buckets that are not marked yet.
  absl::Status AdmitFinish(std::uint64_t step, const std::vector<bool>& used,
                           std::vector<std::size_t>* rest, std::vector<ByteSpan>* zeros) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CommitFinish(std::uint64_t step, const std::vector<bool>& used, absl::Time start)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // OK if a stream may wait for `bucket`, or for every bucket if nullopt. `waited`: those that are
  // not done yet.
  absl::Status AdmitStreamWait(std::uint64_t step, std::optional<std::size_t> bucket,
                               std::vector<std::size_t>* waited) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Between these two the done words stay poisoned, so that no stream of the trainer stays parked.
  void BeginRelease() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndRelease() ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- The daemon's messages, on the stream's thread

  void OnStepDone(const v1::StepDone& done) ABSL_LOCKS_EXCLUDED(mutex_);
  // LeaveDone: this rank takes part again, from step `next_step` on.
  void OnResume(std::uint64_t next_step) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnStepState(const v1::StepState& state) ABSL_LOCKS_EXCLUDED(mutex_);
  // The session has ended, so the daemon writes nothing more. Poisons the done words, which ends
  // every wait, and only then takes a lock.
  void OnSessionEnd(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr std::size_t kMaxOutstanding = 2;

  absl::Status BeingReplacedError(std::uint64_t step, absl::string_view call) const;
  absl::Status CheckNoOpenStepLocked(absl::string_view call) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // OK if `step` is the one to mark, and this rank may still add to it.
  absl::Status Admit(std::uint64_t step, absl::string_view call) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status AdmitMarkLocked(std::uint64_t step, std::size_t bucket) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // `call` ends the step.
  absl::Status AdmitEnd(std::uint64_t step, const std::vector<bool>& used,
                        absl::string_view call) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Adds the spans of gradients in `bucket` that were marked unused.
  void AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Mark(std::size_t bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Statistics of a call that marked `marks` buckets and began at `start`.
  void CountMarks(std::uint64_t step, std::size_t marks, absl::Time start)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `ready_rest`: the message also marks the buckets that no BucketReady has marked.
  void SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `step` is the one to mark from now on.
  void Open(std::uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The step may be decided although no verdict has arrived: this rank has ended it, or, on a GPU,
  // has marked every bucket, and a stream may have gone on already.
  bool MaybeDecided(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Why the session has ended, for a call about `step`.
  absl::Status EndOf(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // A wait for `step` has its answer: the verdict, or the session's end.
  bool Settled(std::uint64_t step) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return decided_.last() >= step || !end_.ok();
  }
  // The answer of WaitBucket after the bucket's done word released it.
  absl::Status AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                      const DaemonSilence& silence) const;
  // Asks the daemon which ranks are late.
  absl::Status TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                        absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases every wait on a done word, once.
  void Poison() const;
  // The same until EndRelease, whatever a GPU still writes to the words.
  void KeepPoisoned() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Time& last_mark(std::uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return last_marks_[step % kMaxOutstanding];
  }
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
  const std::size_t bucket_count_;
  const std::vector<PlannedSpan> gradients_;  // by parameter
  const StepErrors errors_;
  std::uint64_t reduced_bytes_ = 0;  // of a complete step
  const bool on_device_;
  const std::size_t max_outstanding_;       // steps
  const std::shared_ptr<std::byte> arena_;  // null on a GPU
  const std::shared_ptr<MappedMemory> semaphores_;

  // The step to mark. Written under mutex_; read anywhere.
  std::atomic<std::uint64_t> next_step_{1};

  mutable absl::Mutex mutex_;
  OpenStep open_ ABSL_GUARDED_BY(mutex_);  // the step next_step_
  // The last step for which this rank sent EndStep; 0: none.
  std::uint64_t ended_step_ ABSL_GUARDED_BY(mutex_) = 0;
  // When a step's last bucket was marked, by step % kMaxOutstanding; the infinite past: no mark.
  std::array<absl::Time, kMaxOutstanding> last_marks_ ABSL_GUARDED_BY(mutex_);
  DecidedSteps decided_ ABSL_GUARDED_BY(mutex_);
  // Restores the last complete step's gradients, until the next step's first mark; null: none.
  std::shared_ptr<Restoration> restoration_ ABSL_GUARDED_BY(mutex_);
  // The step of the QueryStep that waits for its answer; 0: none.
  std::uint64_t asked_step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<std::string> missing_ ABSL_GUARDED_BY(mutex_);  // the last answer
  bool replacing_ ABSL_GUARDED_BY(mutex_) = false;
  bool releasing_ ABSL_GUARDED_BY(mutex_) = false;  // since BeginRelease
  // On a GPU, from the session's end or BeginRelease until EndRelease.
  std::unique_ptr<PoisonKeeper> poison_keeper_ ABSL_GUARDED_BY(mutex_);
  // Why the session has ended, or that the layout was replaced.
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_CLIENT_H_
