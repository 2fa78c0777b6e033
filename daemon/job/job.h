// One data-parallel run: its ranks, its layouts, its own channel. Pure logic: no threads, no
// sockets, an injected clock.
//
// Thread-safe. A call changes the state under the job's lock, and releases the lock before it
// submits reductions and flushes messages. So a Reducer may complete an operation from within
// Reduce(), and a sink may send slowly.
//
// A Job is one generation. If a rank is lost, all sessions of the job end for good. They also end
// if JobTable starts a newer generation; JobTable::Join names the exception. With policy `hold` the
// loss of a rank ends only that rank's session, if HoldPolicy allows it. Then running steps wait,
// and the rank's next session takes its place.
//
// Shared: the JobTable, the job's sessions and its launches between nodes hold references to it.
// Other reductions in flight hold none: the JobTable keeps the job until they are done. The job
// holds its layouts. It holds the memory of its sessions until that memory is unused.
//
// Lock order: Job::mutex_ -> the sinks' own queue locks. No call is made to a Reducer or executor
// under the lock.

#ifndef DAEMON_JOB_JOB_H_
#define DAEMON_JOB_JOB_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/collective_order.h"
#include "daemon/job/deferred_actions.h"
#include "daemon/job/done_word_turns.h"
#include "daemon/job/hold_policy.h"
#include "daemon/job/job_options.h"
#include "daemon/job/job_port.h"
#include "daemon/job/job_status.h"
#include "daemon/job/job_terms.h"
#include "daemon/job/layout_set.h"
#include "daemon/job/membership.h"
#include "daemon/job/operation_channel.h"
#include "daemon/job/position.h"
#include "daemon/job/rank_rules.h"
#include "daemon/job/rank_session.h"
#include "daemon/job/staging_memory.h"
#include "daemon/job/state_healing.h"
#include "daemon/reduce/reducer.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {

struct JobIdentity {
  uid_t uid = 0;
  std::string job_id;
  std::string token_hash;  // SHA-256, empty without a token
  std::uint64_t generation = 1;
  PodId pod;  // of the rank that began the job; none if that rank is in no pod, or on another node
  std::shared_ptr<MemoryOrigin> origin = nullptr;  // of that rank; null: it is on this node

  // The tenant that is charged for what the job keeps, and whose share of the threads the job uses.
  Tenant payer() const { return Tenant(uid, pod); }
  // Null `quota`: nothing is charged.
  MemoryAccount AccountIn(ArenaQuota* quota) const { return {quota, payer(), origin}; }
};

// The objects that a job uses. All outlive it.
struct JobEnvironment {
  const Clock* clock = nullptr;
  Reducer* reducer = nullptr;
  // The daemon's copier (docs/architecture.md), not the sessions' executor. Never runs work inline.
  UserExecutor* executor = nullptr;
  std::size_t max_buckets_per_layout = kDefaultMaxBuckets;
  ArenaQuota* memory = nullptr;    // charged for what jobs keep; null: nothing is charged
  std::string node_name;           // for jobs with ranks on other nodes
  Reducer* gpu_reducer = nullptr;  // null: there are no layouts on GPUs
  // Logs a notice that is sent to waiting ranks: "layout 'model' after 5s: rank 1 has not joined
  // the job". May be null. Called without any job's lock.
  std::function<void(uid_t uid, const std::string& job_id, const std::string& text)> log_late;
  // Logs that a forming job has the user and id of another one, with another token. May be null.
  // Called without locks.
  std::function<void(uid_t uid, const std::string& job_id)> log_other_token;
  std::size_t signalled_at_once = kSignalledAtOnce;  // done words; other values are for tests
};

class Job final : public JobPort, public std::enable_shared_from_this<Job> {
 public:
  // `charge`: a reservation of BytesFor(world_size).
  Job(JobIdentity identity, std::uint32_t world_size, const JobOptions& options,
      const JobEnvironment& environment, ArenaQuota::Reservation charge = {});

  // The memory of a job without its layouts: an estimate, a little too high.
  static std::uint64_t BytesFor(std::uint32_t world_size);

  const JobIdentity& identity() const { return identity_; }
  // What its user has paid for it. 0: there is no quota.
  std::uint64_t charged_bytes() const { return charge_.bytes(); }
  const std::string& job_id() const override { return identity_.job_id; }
  std::uint32_t world_size() const { return world_size_; }

  // Puts a session, on this node or on `node`, into its rank. `pod`: the pod of its process, if
  // that is on this node.
  //   FAILED_PRECONDITION  JOB_MISMATCH: another world size or options.
  //   ALREADY_EXISTS       the job has ended, or the rank is neither absent nor held. The caller
  //                        begins a new generation if it may.
  absl::Status Join(std::uint32_t rank, std::uint32_t world_size, const JobOptions& options,
                    std::uint64_t incarnation, std::shared_ptr<SessionSink> sink,
                    const std::string& node = "", PodId pod = {});

  // Notes that a job of the same user and id has another token. From now on, errors and notices
  // about ranks that have not joined say so. True if this is new.
  bool NoteOtherToken();
  // Notes that ranks may be on other nodes, and cannot join. From now on, errors and notices about
  // ranks that have not joined say so.
  void NoteNoPeers();

  // Sets the reducer for operations with ranks on other nodes. Only the first call has an effect.
  void UseNodeGroup(std::shared_ptr<Reducer> node_group);

  // ---- JobPort
  void RegisterLayout(RankSession session, LayoutRequest request, Registered answer) override {
    answer(RegisterLayout(session, std::move(request)));
  }
  absl::StatusOr<Registration> RegisterLayout(RankSession session, LayoutRequest request);
  void KeepMemory(RankSession session, std::uint32_t channel,
                  std::shared_ptr<void> memory) override;
  UserQueue releases() const override { return {environment_.executor, identity_.payer()}; }
  void RefuseLayout(RankSession session, std::uint32_t channel, const absl::Status& why) override;
  absl::Status CheckReplaces(RankSession session, std::uint32_t channel) const override;
  // A rank of another node has no memory here: every field of `memory` except `gpu` is null.
  absl::Status ArenaMapped(RankSession session, std::uint32_t channel, RankMemory memory) override;
  absl::Status Deliver(const RankMessage& message) override { return message.call(this); }
  void Lose(RankSession session, const absl::Status& why) override;
  RankState StateOf(RankSession session) const override;
  std::vector<CurrentLayout> CurrentLayouts(RankSession session) const override;
  bool WouldHold(RankSession session) const override;

  // ---- A rank's messages. Statuses as for JobPort.
  // `position`: where the rank is in its data, if it says so.
  absl::Status MarkReady(RankSession session, std::uint32_t channel, std::uint64_t step,
                         absl::Span<const std::uint32_t> buckets,
                         std::optional<Position> position = std::nullopt);
  absl::Status EndStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                       absl::string_view used_map, std::optional<Position> position = std::nullopt);
  // MarkReady of every bucket that the rank has not marked, and EndStep.
  absl::Status FinishStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                          absl::string_view used_map,
                          std::optional<Position> position = std::nullopt);
  absl::Status AbandonStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                           absl::string_view reason);
  // The rank no longer uses the layout.
  absl::Status ReleaseLayout(RankSession session, std::uint32_t channel);
  absl::Status Operate(RankSession session, std::uint64_t sequence, const OperationSpec& spec,
                       StagingMemory staging, std::uint64_t deadline_ns);
  absl::Status ChunkWritten(RankSession session, std::uint64_t sequence, std::uint64_t chunk,
                            std::uint64_t bytes);
  absl::Status ChunkRead(RankSession session, std::uint64_t sequence, std::uint64_t chunk);
  absl::Status BeginCollective(RankSession session, absl::string_view description);
  // The rank has waited this long for a collective that it has begun. Tells it which ranks have
  // begun fewer collectives, if there are any.
  absl::Status QueryCollectives(RankSession session, absl::Duration waited);
  // ---- The state of the model: see StateHealing.
  // `timeout_ns`: how long it may take until the rank may mark buckets; 0: no deadline.
  // hold_timeout still ends the job if others wait too long. The pages of `staging` are populated.
  absl::Status FetchState(RankSession session, StagingMemory staging, std::uint64_t timeout_ns);
  absl::Status OfferState(RankSession session, std::uint64_t transfer, std::uint64_t bytes,
                          StagingMemory staging);
  absl::Status StateWritten(RankSession session, std::uint64_t transfer, std::uint64_t chunk);
  absl::Status StateRead(RankSession session, std::uint64_t transfer, std::uint64_t chunk);
  absl::Status TakeDigests(RankSession session, std::uint64_t transfer,
                           std::vector<StateDigest> items, ArenaQuota::Reservation charge = {});
  absl::Status RefuseState(RankSession session, std::uint64_t transfer, absl::string_view why);
  absl::Status Leave(RankSession session, bool exit);
  absl::Status Finish(RankSession session);

  // True if the rank's next session belongs to this generation: the policy is `hold`, the job is
  // full and has not ended, and the rank takes part or is beyond the world size. Join() then
  // takes the rank's next session if its last one is lost, and refuses it otherwise.
  bool Replaceable(std::uint32_t rank) const;

  // What this step waits for; "" if it is not running.
  std::string MissingInStep(std::uint32_t channel, std::uint64_t step) const;

  // Ends every session with `why` (SUPERSEDED, DRAINING).
  void End(const absl::Status& why);
  // Ends every session with `why` if no step is running, or if running steps wait for a lost rank.
  // True once each session's SessionEndMessage is queued and nothing touches its memory.
  bool EndIfIdle(const absl::Status& why);
  // Call it when the job is empty and no rank joins it any more. Keeps only what people may still
  // ask about.
  void Retire();
  void Tick();

  RankState StateOf(std::uint32_t rank) const;
  // Some rank runs or ran in this pod. If `pod` is none: some rank is or was in no pod, or in one
  // that this node does not know.
  bool HasRankIn(const PodId& pod) const;
  // No session is left, and no reduction touches the memory of a session.
  bool Empty() const;
  // Every rank has joined once.
  bool Formed() const;
  // The rank is lost, and the job waits for its next session.
  bool IsHeld(std::uint32_t rank) const;
  // The policy is `hold`, every rank has joined, the job has not failed, and this rank has left it
  // for good or finished.
  bool HasCompleted(std::uint32_t rank) const;
  bool HasEnded() const;
  bool StepRunning() const;
  JobSnapshot Snapshot() const;
  // The last steps of a layout; nullopt if there is no such layout.
  std::optional<std::vector<StepTimes>> Timeline(absl::string_view layout, std::size_t steps) const;

 private:
  //   kActive --StopLocked--> kEnding --MaybeEnd--> kEnded
  enum class Phase : std::uint8_t {
    kActive,
    kEnding,  // the job has ended, but something still touches its sessions' memory
    kEnded,   // its sessions have ended too
  };

  // Locks the job; at its end unlocks it and carries out the actions.
  class Transaction;

  Reducer* ReducerOf(const ReduceOperation& operation, Reducer* node_group) const;
  void Reduce(absl::Span<ReduceOperation* const> operations, Reducer* node_group) const;

  // As LayoutSet::NeedsPlan().
  bool NeedsPlan(RankSession session, const LayoutRequest& request) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the sessions of the ranks that have left for good, unless policy `hold` makes those ranks
  // wait.
  void EndLeavingSessions(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called before a rank ends a step. Notes the last operation that the rank has called.
  void NoteOperation(std::uint32_t rank, std::uint64_t step, LayoutChannel* layout) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets the ranks that have healed take part in operations again, and tells each its first
  // operation: see OperationChannel. If an operation is under way without a rank, and the rank
  // cannot join it, the rank heals only after that operation has ended.
  void HealRanks(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If every rank has left, lets those that stayed take part again. If they have many done words,
  // the executor writes these first: a trainer's memory may be swapped out, and threads of all
  // users wait for this lock.
  void MaybeResume(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Resume(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The session's messages no longer count.
  bool Ended(RankSession session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets transfers of the state go on, and ends the job if survivors have different states.
  void UpdateHealing(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the job with `why` unless `why` is OK.
  void StopIf(const absl::Status& why, DeferredActions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the job if `failure`, of a reducer or an engine, is not OK.
  void FailLocked(const absl::Status& failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EmptyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Some rank has a session.
  bool AnyIsSeated() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Every rank has left for good while the executor wrote done words for ranks that stayed. The job
  // ends without an error as soon as these words are written.
  bool OnlyWordsAreLeft() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Destroys these on the executor, one in each turn. An arena is unmapped in turns of its own.
  void ReleaseLater(std::vector<std::shared_ptr<void>> released);
  void MaybeEnd(DeferredActions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fills the snapshot's lists of ranks.
  void ListRanks(JobSnapshot* snapshot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A piece of work touches the memory of some session.
  bool InFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ArenaQuota::Reservation charge_;  // first: given back when everything else is freed
  // Constant after construction.
  const JobIdentity identity_;
  const std::uint32_t world_size_;
  const JobEnvironment environment_;
  const JobTerms terms_;

  mutable Mutex mutex_;
  std::shared_ptr<Reducer> node_group_ ABSL_GUARDED_BY(mutex_);
  Membership members_ ABSL_GUARDED_BY(mutex_);
  // A rank that had a session when AnyIsSeated() last looked; AnyIsSeated() looks there first. The
  // table asks each job often, and a job may have many ranks that have not joined.
  mutable std::uint32_t seated_ ABSL_GUARDED_BY(mutex_) = 0;
  LayoutSet layouts_ ABSL_GUARDED_BY(mutex_);
  OperationChannel operations_ ABSL_GUARDED_BY(mutex_);
  CollectiveOrder collectives_ ABSL_GUARDED_BY(mutex_);
  StateHealing healing_ ABSL_GUARDED_BY(mutex_);
  RankRules rules_ ABSL_GUARDED_BY(mutex_);
  HoldPolicy hold_ ABSL_GUARDED_BY(mutex_);
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kActive;
  bool resuming_ ABSL_GUARDED_BY(mutex_) = false;  // the executor writes words before Resume()
  absl::Status end_ ABSL_GUARDED_BY(mutex_);       // why the job has ended; OK in kActive
};

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_JOB_H_
