// One layout of a job and its steps, one after the other. This is where a bucket's life is decided:
// ready on every rank -> reduction -> done -> committed with its step, or void.

#ifndef DAEMON_JOB_LAYOUT_CHANNEL_H_
#define DAEMON_JOB_LAYOUT_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/arena/semaphore_page.h"
#include "daemon/job/average_copy.h"
#include "daemon/job/bucket_reductions.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/gpu_step.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/layout_plan.h"
#include "daemon/job/membership.h"
#include "daemon/job/rank_search.h"
#include "daemon/job/running_step.h"
#include "daemon/job/step_report.h"
#include "daemon/reduce/reducer.h"
#include "daemon/telemetry/layout_stats.h"
#include "daemon/telemetry/step_timeline.h"

namespace gradsync::daemon {

// First the ranks agree on the layout (LayoutAgreement), then steps run (RunningStep):
//
//   (Register Mapped)^ranks  ready  ( (MarkReady* (EndStep | FinishStep))^ranks commit
//                                   | MarkReady* Abandon/deadline void )*  Release^ranks
//
// Externally synchronized: guarded by the job's lock. Never blocks. Queues messages, and writes the
// done words of copied averages, and those of void steps that have few. All other actions that a
// change causes go into DeferredActions. Owns its reductions, so it lives until none is in flight.
class LayoutChannel {
 public:
  // The job takes its lock, stops if the reduction has failed, and calls Reduced().
  using OnReduced = BucketReductions::OnReduced;
  // The job takes its lock, calls Copied(), and ends if Copied() fails.
  using OnCopied = std::function<void(LayoutChannel*, AverageCopy*)>;
  // The job takes its lock and calls Signalled().
  using OnSignalled = std::function<void(LayoutChannel*)>;
  // Arguments as of LayoutAgreement; `plan` is the plan of `spec`.
  LayoutChannel(std::uint32_t channel, LayoutSpec spec, std::uint32_t replaces,
                std::uint32_t first_rank, LayoutPlan plan, const JobTerms& terms,
                Membership* members, OnReduced reduced, OnCopied copied, OnSignalled signalled);

  // The memory of a layout, except the arenas: an estimate, a little too high.
  static std::uint64_t BytesFor(const LayoutSpec& spec, const LayoutPlan& plan, std::size_t ranks);
  // Keeps the charge for the layout.
  void Charge(ArenaQuota::Reservation charge) { charge_ = std::move(charge); }
  // Takes so many bytes of it, for what is kept when the layout ends.
  ArenaQuota::Reservation SplitCharge(std::uint64_t bytes) { return charge_.Split(bytes); }

  std::uint32_t channel() const { return agreement_.channel(); }
  const std::string& name() const { return agreement_.name(); }
  const LayoutSpec& spec() const { return agreement_.spec(); }
  const LayoutPlan& plan() const { return plan_; }
  LayoutAgreement& agreement() { return agreement_; }
  const LayoutAgreement& agreement() const { return agreement_; }
  bool ready() const { return agreement_.reached(); }
  // The running step, or the next one if none is running.
  std::uint64_t step() const { return step_.number(); }
  bool running() const { return step_.begun(); }
  // The running step may still become complete.
  bool may_complete() const { return step_.phase() == RunningStep::Phase::kRunning; }

  // The agreement is complete, and steps may begin. `replaced`: the layout that this one replaces,
  // or null. The new layout continues its step numbers and statistics, and nobody uses the old one
  // any more.
  void Begin(LayoutChannel* replaced, DeferredActions* actions);

  // ---- Steps. A Status that is not OK is a breach of the protocol by this rank and ends its
  // session.
  // `position`: where the rank is in its data, if it says so.
  absl::Status MarkReady(std::uint32_t rank, std::uint64_t step,
                         absl::Span<const std::uint32_t> buckets, std::optional<Position> position,
                         std::uint64_t now_ns, DeferredActions* actions);
  absl::Status EndStep(std::uint32_t rank, std::uint64_t step, absl::string_view used_map,
                       std::optional<Position> position, std::uint64_t now_ns,
                       DeferredActions* actions);
  // MarkReady of the buckets that the rank has not marked, in order, then EndStep.
  absl::Status FinishStep(std::uint32_t rank, std::uint64_t step, absl::string_view used_map,
                          std::optional<Position> position, std::uint64_t now_ns,
                          DeferredActions* actions);
  absl::Status Abandon(std::uint32_t rank, std::uint64_t step, absl::string_view reason,
                       std::uint64_t now_ns, DeferredActions* actions);
  // Called before a rank ends the step. Keeps `operation`, the number of the last operation before
  // this EndStep. Live ranks (`live`) all call the same operations before it, so the first one
  // decides. If only healing ranks end the step, the last one decides.
  void NoteOperation(std::uint64_t step, std::uint64_t operation, bool live) {
    if (step != step_.number() || of_step_.last_operation_decided) return;
    of_step_.last_operation = operation;
    of_step_.last_operation_decided = live;
  }
  // The rank no longer uses the layout, and sends no further message about it. The rank's memory is
  // released as soon as no reduction can touch it. A step that needs the rank is void after 5 s.
  void RankReleased(std::uint32_t rank, std::uint64_t now_ns, DeferredActions* actions);
  // Every rank has released the layout or replaces it, so no rank can end the running step. Unless
  // every rank has ended it before, the step is void. Does nothing if no step is running.
  void VoidUnused(std::uint64_t now_ns, DeferredActions* actions);
  bool released(std::uint32_t rank) const { return released_[rank]; }
  bool AnyHasReleased() const { return released_ranks_ > 0; }
  // No step is running, and no rank that is in the job has the layout any more.
  bool ReleasedByAll() const;
  // The reducer has finished a bucket. Unless the reduction failed, the bucket's done words are
  // already written.
  void Reduced(std::size_t index, const ReduceTimes& times, std::uint64_t now_ns,
               DeferredActions* actions);
  // An average has been copied, or the copy has been measured. FAILED_PRECONDITION
  // PROTOCOL_VIOLATION: a trainer has changed the average; the job must end.
  absl::Status Copied(AverageCopy* copy, std::uint64_t now_ns, DeferredActions* actions);
  // The done words of a void step are written.
  void Signalled(std::uint64_t now_ns, DeferredActions* actions);
  // How many pieces of work touch memory of the layout or of its sessions.
  std::size_t in_flight() const { return step_.in_flight() + (of_step_.signals.under_way ? 1 : 0); }

  // ---- Membership
  // True if the rank has begun the running step.
  bool HasBegunStep(std::uint32_t rank) const { return step_.Has(rank); }
  bool HasEndedStep(std::uint32_t rank) const { return step_.Ended(rank); }
  // The rank contributes nothing from now on. Not called while the rank is in a step. `exited`: its
  // memory is released.
  void RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns, DeferredActions* actions);
  // The rank's session is lost, but the rank takes part in steps as before: its next session maps
  // other memory and marks the buckets. If the lost session has ended the running step, that step
  // completes with its gradients. Only in host memory, and after the agreement.
  void RankLost(std::uint32_t rank, std::uint64_t now_ns, DeferredActions* actions);
  // The rank's next session has mapped its memory. It begins with the running step, or with the
  // next one if the lost session has ended the running step.
  void RankRejoined(std::uint32_t rank, DeferredActions* actions);
  // Call it when no rank is held any more.
  void ResumeDeadline(std::uint64_t now_ns) { step_.Resume(now_ns); }
  // True if `rank` waits for the verdict of the running step, and `replacement`, which came back
  // after a loss, begins with this step. Then `rank` has the state that the replacement needs, and
  // does not change it.
  bool IsFrozenFor(std::uint32_t rank, std::uint32_t replacement) const;
  // The same for a rank that has begun the step, and may still compute.
  bool HasBegunFor(std::uint32_t rank, std::uint32_t replacement) const;
  // True if some rank has begun the running step, and the step needs a rank that is missing, or
  // that came back and has no memory yet.
  bool RankWaits() const;
  // True if the running step has gradients of a lost session of this rank.
  bool HasGradientsOfEarlier(std::uint32_t rank) const {
    return step_.HasGradientsOfEarlier(members_->SessionOf(rank));
  }
  // True if the rank's present session has its memory and takes part in the running step, and no
  // bucket has gradients of an earlier session. Also true if the rank has released the layout and
  // is in no step.
  bool OwesNothing(std::uint32_t rank) const;
  // True once some step was complete: from then on a lost rank can be replaced.
  bool can_replace_ranks() const { return can_replace_ranks_; }
  // The rank had left and takes part again, from the next step on. No step is running.
  void RankResumed(std::uint32_t rank);
  // Adds pieces of work that end the rank's waits for steps that it has missed: they write its done
  // words. They must have run before RankResumed(), because the next step writes the same words.
  void AddMissedWords(std::uint32_t rank, std::vector<std::function<void()>>* pieces) const;

  // ---- The end of the job, in this order.
  // The job has ended: no reduction begins any more, and only FinishSeen() can commit the running
  // step.
  void Stop() { step_.Cut(); }
  // Call it when the running step is void. On GPUs, its reductions in flight then stop waiting for
  // gradients. Only the first call for a step has an effect.
  void GiveUp(DeferredActions* actions);
  // Call it when nothing is in flight. If the trainers' streams have seen the running step
  // complete, the step is committed. If they may have seen it complete, it ends in doubt.
  void FinishSeen(std::uint64_t now_ns, DeferredActions* actions);
  // Releases the memory of every rank.
  void ReleaseMemory(DeferredActions* actions);

  // Ends the agreement or the running step if its deadline has passed. Tells the ranks that wait
  // which ranks are late.
  void Tick(std::uint64_t now_ns, DeferredActions* actions);

  // ---- For people
  StepReport report() const { return {terms_, *members_, agreement_, step_}; }
  // The first bucket of the running step that this rank has not marked ready; nullopt if it has
  // marked all.
  std::optional<std::size_t> FirstUnmarked(std::uint32_t rank) const {
    return step_.FirstUnmarked(rank);
  }
  const LayoutStats& stats() const { return stats_; }
  const StepTimeline& timeline() const { return *timeline_; }
  // What people may still ask about a layout that has ended. `charge` is what is charged for it,
  // empty if nothing is.
  struct Remains {
    std::unique_ptr<StepTimeline> timeline;  // null: no step is kept
    ArenaQuota::Reservation charge;
  };
  // The last call on the layout. `timeline_bytes`: the most bytes for the steps that are kept.
  Remains TakeRemains(std::uint64_t timeline_bytes);

 private:
  ArenaQuota::Reservation charge_;  // first: given back when everything else is freed

  // What to do with a message about a step.
  enum class Admission : std::uint8_t {
    kAdmit,
    kIgnore,  // its step became void before the rank could know
    kEarly,   // about the next step: the message waits for that step
  };

  absl::StatusOr<Admission> Admit(std::uint32_t rank, std::uint64_t step,
                                  absl::string_view what) const;
  // FAILED_PRECONDITION POSITION_MISMATCH: another rank is at another position.
  absl::Status TakePosition(std::uint32_t rank, std::optional<Position> position);
  // `last`: the message ends or abandons the step.
  absl::Status Postpone(std::uint32_t rank, std::uint64_t step, bool last,
                        EarlyMessages::Message message);
  RunningStep NewStep(std::uint64_t number) const;
  void StartStep(std::uint64_t now_ns);
  void Mark(std::uint32_t rank, std::size_t index, std::uint64_t now_ns, DeferredActions* actions);
  void Launch(std::size_t index, DeferredActions* actions);
  void Void(absl::Status why, std::uint64_t now_ns, DeferredActions* actions);
  // Tells the rank that the bucket is done, if it wants such messages.
  void TellBucketDone(std::size_t index, std::uint32_t rank, DeferredActions* actions);
  // The session from whose memory the average of a reduced bucket is copied: a live one if there is
  // one, else a lost one.
  RankSession AverageSource(std::size_t index) const;
  // Copies the average of a reduced bucket to a session that needs it. Does nothing if no session
  // with memory has the average, or this one has no memory.
  void CopyAverage(std::size_t index, std::uint32_t rank, DeferredActions* actions);
  // True if every bucket is done, and none is known to be void on the GPUs. Then the trainers'
  // streams may have seen the running step complete.
  bool MaybeSeenComplete() const;
  // True if, in addition, no bucket is in doubt. Then the streams have seen the step complete.
  bool SeenComplete() const;
  // True if a rank that the running step waits for has not ended it.
  bool AnyOwesEnd();
  void MaybeFinish(std::uint64_t now_ns, DeferredActions* actions);
  // The running step is void. If it has many done words, the executor writes them and wakes their
  // waiters, before the ranks get the verdict. Then returns true: Signalled() finishes the step,
  // and the caller must not.
  bool SignalLater(DeferredActions* actions);
  // Writes the done words of a void step that the executor has not written.
  void SignalNow();
  // Commits the running step, or ends it as void, and replaces it by the next one.
  void Finish(absl::Status verdict, std::uint64_t now_ns, DeferredActions* actions);
  // How many ranks' gradients are in the running step.
  std::uint32_t RanksOfStep() const;
  // A rank that the running step waits for in vain, because it has released the layout; nullopt if
  // there is none.
  std::optional<std::uint32_t> AwaitedInVain() const;
  // Tells the ranks that have ended the running step which ranks are late.
  void TellLate(std::uint64_t now_ns, DeferredActions* actions);
  // True if a bucket that is not reduced has gradients of this session, or an average is being
  // copied from or to this session.
  bool Touches(RankSession session) const;
  // Releases the memory of lost sessions that nothing touches any more. If no live session has
  // contributed to a reduced bucket, the memory of one lost session stays, because it has the
  // average.
  void ReleaseLostMemory(DeferredActions* actions);
  // Releases the memory that of_step_ holds.
  void ReleaseStep(DeferredActions* actions);
  // Releases the rank's memory if it has released the layout and is in no step.
  void ReleaseIfUnused(std::uint32_t rank, DeferredActions* actions);

  // Constant after construction.
  const LayoutPlan plan_;
  const JobTerms& terms_;
  Membership* const members_;
  const OnCopied copied_;
  const OnSignalled signalled_;

  LayoutAgreement agreement_;
  BucketReductions reductions_;

  // What the executor does at the end of a void step: it writes done words.
  struct Signals {
    bool begun = false;
    bool under_way = false;
    std::vector<std::shared_ptr<SemaphorePage>> pages;  // the words that it writes
  };
  // The rest of the running step's state.
  struct StepState {
    GpuVerdict gpu_verdict;
    // The last operation of the job's channel before the step's EndStep: see NoteOperation().
    std::uint64_t last_operation = 0;
    bool last_operation_decided = false;  // a live rank has ended the step
    Signals signals;
    std::vector<std::unique_ptr<AverageCopy>> copies;
  };
  // The running step has these two parts. Both are replaced at its end.
  RunningStep step_;
  StepState of_step_;
  EarlyMessages early_;  // about the step after step_
  // By rank: the last step that it has ended. Steps between that one and step_ were void.
  std::vector<std::uint64_t> last_ended_;
  std::vector<bool> released_;              // by rank
  std::uint32_t released_ranks_ = 0;        // how many ranks have released it
  std::vector<std::uint64_t> released_ns_;  // by rank: when it released the layout
  // By rank: the first step of its present session; kNoStep until a session that came after a loss
  // has its memory.
  std::vector<std::uint64_t> first_step_;
  bool can_replace_ranks_ = false;
  // When the running step becomes void, if it waits for a rank that has released the layout.
  std::uint64_t patience_ends_ns_ = 0;
  LateNotice late_notice_;
  RankSearch owes_end_;      // for a rank that has not ended step_
  mutable RankSearch uses_;  // for a rank that has not released the layout

  LayoutStats stats_;
  std::unique_ptr<StepTimeline> timeline_;  // never null
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_LAYOUT_CHANNEL_H_
