// The layouts of a job. Its ranks add and replace them.

#ifndef DAEMON_JOB_LAYOUT_SET_H_
#define DAEMON_JOB_LAYOUT_SET_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/job_status.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_agreement.h"
#include "daemon/job/layout_channel.h"
#include "daemon/job/membership.h"
#include "daemon/telemetry/step_timeline.h"

namespace gradsync::daemon {

// The most layouts of a job. As many replacements of layouts may be in agreement beside them.
// Clients cannot raise it.
inline constexpr std::size_t kMaxLayouts = 256;

// A layout of the job as it is now. `step`: the running one, or the next one if none is running.
struct CurrentLayout {
  std::shared_ptr<const LayoutSpec> spec;  // never null
  std::uint64_t step = 0;
};

// A layout joins the set when its first rank registers it, and gets the next channel number. Its
// steps begin when its agreement is reached; then it takes the place of the layout that it
// replaces. A layout leaves the set when it is replaced or its agreement fails. The number of its
// channel is never used again. A rank may also release a layout. Then the rank no longer has the
// layout, and may use its name again. When every rank has released it, it leaves the set.
//
// Externally synchronized: guarded by the job's lock. Owns the layouts. A layout stays in the set
// while a step of it runs: it cannot be replaced in the middle of a step.
class LayoutSet {
 public:
  // `terms` and `members` outlive this object. The callbacks are those of every layout.
  LayoutSet(const JobTerms& terms, Membership* members, std::size_t max_buckets_per_layout,
            LayoutChannel::OnReduced reduced, LayoutChannel::OnCopied copied,
            LayoutChannel::OnSignalled signalled);

  // Null if no layout has this channel.
  LayoutChannel* Find(std::uint32_t channel) const;
  // The layout that `rank` may use in steps. INVALID_ARGUMENT UNKNOWN_CHANNEL; FAILED_PRECONDITION:
  // the rank has left, has released the layout, or is replacing it. Or it came back after a loss,
  // and lacks the state of the model or its memory for the layout.
  absl::StatusOr<LayoutChannel*> OfRank(std::uint32_t rank, std::uint32_t channel) const;

  // ---- Agreements. JobPort describes these calls: RegisterLayout, RefuseLayout, CheckReplaces and
  // ArenaMapped. None of them may come after Stop().

  // True if the request begins an agreement. The caller then makes the layout's plan without the
  // lock, because that may take long, and puts it into the request before Register().
  bool NeedsPlan(std::uint32_t rank, const LayoutRequest& request) const;
  // The layout is valid until the next call.
  absl::StatusOr<LayoutChannel*> Register(std::uint32_t rank, LayoutRequest request,
                                          DeferredActions* actions);
  void Refuse(std::uint32_t rank, std::uint32_t channel, const absl::Status& why,
              DeferredActions* actions);
  absl::Status CheckReplaces(std::uint32_t rank, std::uint32_t channel) const;
  absl::Status ArenaMapped(std::uint32_t rank, std::uint32_t channel, RankMemory memory,
                           DeferredActions* actions);
  // The rank no longer uses the layout. INVALID_ARGUMENT UNKNOWN_CHANNEL; FAILED_PRECONDITION: the
  // rank has released the layout or is replacing it, or the layout is not ready.
  absl::Status ReleaseLayout(std::uint32_t rank, std::uint32_t channel, std::uint64_t now_ns,
                             DeferredActions* actions);
  // Drops the layouts that every rank has released. Called at the end of every change, and before
  // NextSteps().
  void DropReleased(DeferredActions* actions);
  // Ends the agreements and steps whose deadline has passed, and steps of a layout that every rank
  // has released or replaces.
  void Tick(std::uint64_t now_ns, DeferredActions* actions);

  // ---- Membership: as in LayoutChannel. If a rank stays, open agreements fail.
  bool HasBegunStep(std::uint32_t rank) const;
  void RankLeft(std::uint32_t rank, bool exited, std::uint64_t now_ns, DeferredActions* actions);
  // Writes the done words of the steps that ranks have missed while they stayed. Call it before
  // RankResumed(). True: there are many, and the executor writes them and then calls `done`. False:
  // they are written.
  bool WriteMissedWords(std::function<void()> done, DeferredActions* actions) const;
  void RankResumed(std::uint32_t rank);
  void RankLost(std::uint32_t rank, std::uint64_t now_ns, DeferredActions* actions);
  void ResumeDeadlines(std::uint64_t now_ns);
  bool RankWaits() const;
  // True if some step is running and the rank has ended every running step. Until the verdict, the
  // rank has the state of the model that `replacement` needs for its first step, and does not
  // change it.
  bool IsFrozenFor(std::uint32_t rank, std::uint32_t replacement) const;
  // The same for a rank that has begun every running step, and may still compute.
  bool HasBegunFor(std::uint32_t rank, std::uint32_t replacement) const;
  // For a missing rank that has ended the running step of one layout and not that of another:
  // "steps 8 of layout 'a' and 3 of layout 'b'". Otherwise "".
  std::string EndedAndOwed(std::uint32_t rank) const;
  bool HasGradientsOfEarlier(std::uint32_t rank) const;
  // Ranks that came back after a loss are live again once they have contributed to a complete step,
  // owe nothing to any layout, and `may_heal` is true for them. Returns them. Called at the end of
  // every change under policy `hold`.
  std::vector<std::uint32_t> HealRanks(absl::FunctionRef<bool(std::uint32_t rank)> may_heal);
  // Changes whenever a step gets its verdict.
  std::uint64_t StepsDecided() const;
  // Why a rank that is lost now cannot be replaced: "layout 'model' was being agreed". Empty if it
  // can.
  std::string WhyNoReplacement() const;
  // The layouts that a rank which comes back after a loss has to register.
  std::vector<CurrentLayout> CurrentFor(std::uint32_t rank) const;
  // For ranks that resume.
  std::vector<LeaveDoneMessage::NextStep> NextSteps() const;

  // ---- The end of the job, in this order; as in LayoutChannel.
  void Stop();
  void GiveUp(DeferredActions* actions);
  void FinishSeen(std::uint64_t now_ns, DeferredActions* actions);
  void ReleaseMemory(DeferredActions* actions);
  // The last call: keeps only what people may still ask about the layouts.
  void Retire(DeferredActions* actions);

  // Some reduction is in flight.
  bool in_flight() const;
  bool StepRunning() const;
  // True if a step is running or an agreement is open. If not, BegunBy() is "" for every rank.
  bool AnyIsBegun() const;
  // What this rank has begun and not ended: "step 8 of layout 'digits'", "layout 'digits'"; or "".
  std::string BegunBy(std::uint32_t rank) const;

  // ---- For people
  // RANK_LOST: `rank` is lost because of `why`. Says which step or agreement it was in. Called
  // before the rank counts as lost.
  absl::Status LossOf(std::uint32_t rank, const absl::Status& why) const;
  // The ranks that running steps wait for. A rank may be there more than once.
  std::vector<std::uint32_t> MissingRanks() const;
  std::vector<LayoutSnapshot> Snapshot() const;
  // The last layouts that every rank has released. A layout whose name is taken again is left out.
  std::vector<LayoutSnapshot> ReleasedSnapshot() const;
  // The last steps of a layout, also of a released one; nullopt if there is no such layout.
  std::optional<std::vector<StepTimes>> Timeline(absl::string_view layout, std::size_t steps) const;

 private:
  // Looks at the running steps of the layouts that `replacement` has not released. True if there is
  // one, and all of them pass.
  bool AllRunningSteps(std::uint32_t replacement,
                       absl::FunctionRef<bool(const LayoutChannel&)> pass) const;
  // An agreement that failed before every rank had asked for it.
  struct FailedAgreement {
    std::string name;
    std::uint32_t replaces = 0;
    absl::Status status;
    std::vector<bool> unaware;  // by rank: true if it does not know of the failure yet
    ArenaQuota::Reservation charge;
  };

  // What people may still ask about a layout that every rank has released, or whose job has ended.
  struct ReleasedLayout {
    LayoutSnapshot snapshot;
    LayoutChannel::Remains remains;
  };

  // True if some layout has had this channel.
  bool HadLayout(std::uint32_t channel) const;
  absl::Status UnknownChannel(std::uint32_t rank, std::uint32_t channel) const;
  // True if `rank` waits for the replacement of the layout on `channel`.
  bool Replacing(std::uint32_t rank, std::uint32_t channel) const;
  bool Released(std::uint32_t rank, std::uint32_t channel) const;
  // FAILED_PRECONDITION if `rank` may not name `layout` in a message, although it is in the job.
  absl::Status CheckHas(std::uint32_t rank, const LayoutChannel& layout) const;
  // For a rank whose session came after a loss: it gets the layout that the job has.
  absl::StatusOr<LayoutChannel*> Rejoin(std::uint32_t rank, LayoutRequest request);
  // Why no layout can be agreed now: RANKS_LEFT if some rank has left and stays, or was lost and is
  // not live again yet. LOSS_POLICY for a layout on GPUs under policy `hold`. Otherwise OK.
  absl::Status CheckCanAgree(const LayoutRequest& request) const;
  // RANKS_LEFT if some rank has left and stays. Otherwise OK.
  absl::Status RanksLeft(absl::string_view layout) const;

  // The agreement that a request belongs to; null if the request begins one. It is the agreement
  // that replaces the same layout as the request. If there is none, it is one on a layout of the
  // same name.
  LayoutChannel* FindPending(const LayoutRequest& request) const;
  // ALREADY_REGISTERED if the rank has another layout of that name and does not replace it.
  absl::Status CheckName(std::uint32_t rank, const LayoutRequest& request,
                         const LayoutChannel* pending) const;
  // Lets two kinds of request agree on one new layout. Rank A has released the old layout, and
  // registers the new one. Rank B registers the new one as the replacement of the old one. Both end
  // the old layout. Exception: the agreement on the new layout began before the agreement on the
  // old one.
  void MatchReplacement(std::uint32_t rank, LayoutRequest* request,
                        LayoutAgreement* agreement) const;
  // Takes the spec and the plan out of the request.
  absl::StatusOr<LayoutChannel*> BeginAgreement(std::uint32_t rank, LayoutRequest* request);
  // Begins the layouts that are agreed, and drops those that were replaced or have failed. Called
  // after every change.
  void Settle(DeferredActions* actions);
  // Begins a layout whose agreement is complete, and drops the layout that it replaces. Does
  // nothing while a step of that layout runs.
  void BeginSteps(LayoutChannel* layout, DeferredActions* actions);
  static LayoutSnapshot SnapshotOf(std::uint32_t channel, const LayoutChannel& layout);
  static ReleasedLayout RemainsOf(std::uint32_t channel, LayoutChannel* layout,
                                  std::uint64_t timeline_bytes);
  // Empty if no step is kept.
  static std::vector<StepTimes> TimelineOf(const ReleasedLayout& layout, std::size_t steps);
  void RememberReleased(std::uint32_t channel, LayoutChannel* layout);
  void RememberFailure(LayoutChannel* layout);
  // The failure of this agreement that `rank` does not know yet; OK if there is none. Afterwards it
  // counts as known.
  absl::Status TakeFailure(std::uint32_t rank, const LayoutRequest& request);

  // Constant after construction.
  const JobTerms& terms_;
  Membership* const members_;
  const std::size_t max_buckets_per_layout_;
  const LayoutChannel::OnReduced reduced_;
  const LayoutChannel::OnCopied copied_;
  const LayoutChannel::OnSignalled signalled_;

  std::map<std::uint32_t, std::unique_ptr<LayoutChannel>> layouts_;  // by channel
  std::uint32_t last_channel_ = 0;
  std::vector<ReleasedLayout> released_;  // the latest is last; at most one for each name
  std::vector<ReleasedLayout> retired_;   // after Retire()
  bool any_released_ = false;             // some rank has released a layout of the set
  std::vector<FailedAgreement> failures_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_LAYOUT_SET_H_
