// The steps of one layout, seen from one rank: the trainer's calls and the daemon's answers.

#ifndef CLIENT_SRC_STEP_CLIENT_H_
#define CLIENT_SRC_STEP_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/include/gradsync/client.h"
#include "client/src/connection.h"
#include "client/src/daemon_silence.h"
#include "client/src/done_words.h"
#include "client/src/held_gradients.h"
#include "client/src/late_ranks_question.h"
#include "client/src/layout_plan.h"
#include "client/src/mapped_memory.h"
#include "client/src/step_counters.h"
#include "client/src/step_errors.h"
#include "client/src/step_progress.h"
#include "client/src/stream_handoff.h"

namespace gradsync::v1 {
class StepDone;
class StepState;
}  // namespace gradsync::v1

namespace gradsync::client {

// Checks every call against the StepProgress, and sends a message only if the check passes. So a
// trainer's mistake makes the call fail, and does not end the session. On a GPU, DeviceSteps has
// the calls that take streams.
//
// Thread-safe. The Layout owns it; the Connection refers to it weakly. Statuses: those of Layout.
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
  // Constant after Begin.
  std::uint64_t first_step() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return progress_.first_step(); }
  // Needs no lock: it is atomic.
  std::uint64_t next_step() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return progress_.next_step(); }
  // As StepProgress::CheckNoOpenStep.
  absl::Status CheckNoOpenStep(absl::string_view call) const ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Replacement of the layout: BeginReplacement (ReplacementFailed | Replaced)

  // Statuses: those of StepProgress.
  absl::Status BeginReplacement() ABSL_LOCKS_EXCLUDED(mutex_);
  void ReplacementFailed() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends every wait.
  void Replaced() ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Release of the layout

  // Statuses: those of Layout::Release.
  absl::Status Release() ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for a layout that its owner drops: an open step is abandoned first. Queues messages,
  // and waits for nothing but the reader of the model's state, because Python's garbage collector
  // may run this on any thread.
  void Drop() ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- The trainer's calls

  void SetPosition(Position position) ABSL_LOCKS_EXCLUDED(mutex_);
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

  // ---- For DeviceSteps: it calls Admit...() before it puts something on a stream, and Commit...()
  // afterwards

  // OK if `bucket` may be marked. Adds to `zeros` the spans of its parameters that were marked
  // unused.
  absl::Status AdmitMark(std::uint64_t step, std::size_t bucket, std::vector<ByteSpan>* zeros) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Marks the bucket, if that is still allowed. `start`: when the trainer's call began, for
  // statistics.
  absl::Status CommitMark(std::uint64_t step, std::size_t bucket, absl::Time start)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for FinishStep. `rest`: the buckets that are not marked yet.
  absl::Status AdmitFinish(std::uint64_t step, const std::vector<bool>& used,
                           std::vector<std::size_t>* rest, std::vector<ByteSpan>* zeros) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CommitFinish(std::uint64_t step, const std::vector<bool>& used, absl::Time start)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // OK if a stream may wait for `bucket`, or for every bucket if nullopt. `waited`: gets those that
  // are not done yet.
  absl::Status AdmitStreamWait(std::uint64_t step, std::optional<std::size_t> bucket,
                               std::vector<std::size_t>* waited) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Between these two calls the done words stay poisoned, so that no stream of the trainer keeps
  // waiting.
  void BeginRelease() { words_.Poison(next_step()); }
  void EndRelease() { words_.EndPoison(); }

  // ---- The daemon's messages, on the stream's thread

  void OnStepDone(const v1::StepDone& done) ABSL_LOCKS_EXCLUDED(mutex_);
  // LeaveDone: this rank takes part again, from step `next_step` on.
  void OnResume(std::uint64_t next_step) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnStepState(const v1::StepState& state) ABSL_LOCKS_EXCLUDED(mutex_);
  // The session has ended, so the daemon writes nothing more. Poisons the done words, which ends
  // every wait, and only then takes a lock.
  void OnSessionEnd(const absl::Status& end) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Sends ReleaseLayout. No message about the layout follows.
  void SendRelease() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendAbandonStep(absl::string_view reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds the spans of gradients in `bucket` that were marked unused.
  void AddUnused(std::size_t bucket, std::vector<ByteSpan>* spans) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Mark(std::size_t bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The position of `step`, which is the open one; null: the trainer has given none.
  const Position* PositionOf(std::uint64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `ready_rest`: the message also marks the buckets that no BucketReady has marked.
  void SendEndStep(std::uint64_t step, const std::vector<bool>& used, bool ready_rest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pins the state while `wait` runs. `wait` returns whether the step goes on.
  void Pinned(absl::Duration timeout, absl::FunctionRef<bool()> wait);
  // WaitBucket and WaitStep, without the pin.
  absl::Status AwaitBucket(std::uint64_t step, std::size_t bucket, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<StepResult> AwaitStep(std::uint64_t step, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The answer of WaitBucket after the bucket's done word released it.
  absl::Status AfterRelease(std::uint64_t step, std::size_t bucket, bool poisoned)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Silent(std::uint64_t step, std::optional<std::size_t> bucket,
                      const DaemonSilence& silence) const;
  // Asks the daemon which ranks are late. Returns false, and does not ask, if `timeout` is 0 or
  // less: such a wait returns at once.
  bool AskWhoIsLate(std::uint64_t step, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  bool AskWhoIsLateLocked(std::uint64_t step, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TimedOut(std::uint64_t step, std::optional<std::size_t> bucket,
                        absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const std::shared_ptr<Connection> connection_;
  const std::uint32_t channel_;
  const std::size_t bucket_count_;
  const std::vector<PlannedSpan> gradients_;  // by parameter
  const StepErrors errors_;
  const bool on_device_;
  const std::shared_ptr<std::byte> arena_;  // null on a GPU

  DoneWords words_;  // own synchronization

  mutable absl::Mutex mutex_;
  StepProgress progress_ ABSL_GUARDED_BY(mutex_);
  StepCounters counters_ ABSL_GUARDED_BY(mutex_);
  // Restores the last complete step's gradients, until the next step's first mark; null: none.
  std::shared_ptr<Restoration> restoration_ ABSL_GUARDED_BY(mutex_);
  LateRanksQuestion late_ranks_ ABSL_GUARDED_BY(mutex_);
  // The position that the trainer has given for the next step that begins.
  std::optional<Position> next_position_ ABSL_GUARDED_BY(mutex_);
  // The position of step `position_step_`, which has begun.
  std::optional<Position> position_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t position_step_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_CLIENT_H_
