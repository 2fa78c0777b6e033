#include "daemon/job/job.h"

#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// Buckets times ranks. Up to this many, the reduce thread itself sends the messages about a bucket
// or a step that is done, which takes it less than half a millisecond. Beyond, the executor does,
// in a turn for each rank.
constexpr std::size_t kToldAtOnce = 4096;

// Each job has its own share of the reduce threads. Any number that is unique among live jobs
// identifies it.
std::uint64_t FlowOf(const Job* job) { return reinterpret_cast<std::uintptr_t>(job); }

}  // namespace

class ABSL_SCOPED_LOCKABLE Job::Transaction {
 public:
  explicit Transaction(Job* job) ABSL_EXCLUSIVE_LOCK_FUNCTION(job->mutex_) : job_(job) {
    job_->mutex_.Lock();
  }
  ~Transaction() ABSL_UNLOCK_FUNCTION() {
    if (job_->phase_ == Phase::kActive) {
      job_->StopIf(job_->rules_.FinishedRankIsNeeded(*job_->environment_.clock), &actions_);
      job_->StopIf(job_->hold_.LeftEarly(*job_->environment_.clock), &actions_);
    }
    if (job_->phase_ == Phase::kActive) {
      job_->layouts_.DropReleased(&actions_);
      if (job_->terms_.options.Holds()) job_->HealRanks(&actions_);
      job_->StopIf(job_->hold_.StepsOverlap(), &actions_);
      if (!job_->healing_.idle()) job_->UpdateHealing(&actions_);
    }
    Reducer* const node_group = job_->node_group_.get();  // set once
    const Tenant user = job_->identity_.payer();
    job_->mutex_.Unlock();
    // Wakes the waiters first: the reductions could take their cores.
    for (auto& sink : actions_.flushes) {
      if (flush_later_) {
        job_->environment_.executor->Run(user, [sink = std::move(sink)] { sink->Flush(); });
      } else {
        sink->Flush();
      }
    }
    job_->Reduce(actions_.reductions, node_group);
    for (const GivenUpStep& step : actions_.given_up) {
      job_->environment_.gpu_reducer->GiveUp(step);
    }
    for (const auto& [session, why] : actions_.breaches) job_->Lose(session, why);
    for (const std::string& text : actions_.late) {
      if (!job_->environment_.log_late) break;
      job_->environment_.log_late(job_->identity_.uid, job_->job_id(), text);
    }
    for (auto& work : actions_.work) job_->environment_.executor->Run(user, std::move(work));
    job_->ReleaseLater(std::move(actions_.releases));
  }
  DeferredActions* actions() { return &actions_; }
  // Leaves the sending of messages to the executor.
  void FlushLater() { flush_later_ = true; }

 private:
  Job* const job_;
  DeferredActions actions_;
  bool flush_later_ = false;
};

Reducer* Job::ReducerOf(const ReduceOperation& operation, Reducer* node_group) const {
  if (std::holds_alternative<HostReduction>(operation.work)) return environment_.reducer;
  if (std::holds_alternative<DeviceReduction>(operation.work)) return environment_.gpu_reducer;
  return node_group;
}

void Job::Reduce(absl::Span<ReduceOperation* const> operations, Reducer* node_group) const {
  // Nearly always all of them have one reducer.
  while (!operations.empty()) {
    Reducer* const reducer = ReducerOf(*operations.front(), node_group);
    std::size_t same = 1;
    while (same < operations.size() && ReducerOf(*operations[same], node_group) == reducer) ++same;
    reducer->ReduceAll(operations.subspan(0, same));
    operations.remove_prefix(same);
  }
}

std::uint64_t Job::BytesFor(std::uint32_t world_size) {
  // The collectives that are kept for ranks that are behind.
  constexpr std::uint64_t kCollectives =
      CollectiveOrder::kKept * (sizeof(CollectiveOrder::Collective) + kMaxCollectiveBytes);
  // Its membership, its part of the agreements on operations and in status.
  constexpr std::uint64_t kPerRank = 512;
  return sizeof(Job) + kCollectives + world_size * kPerRank;
}

Job::Job(JobIdentity identity, std::uint32_t world_size, const JobOptions& options,
         const JobEnvironment& environment, ArenaQuota::Reservation charge)
    : charge_(std::move(charge)),
      identity_(std::move(identity)),
      world_size_(world_size),
      environment_(environment),
      terms_{identity_.job_id,
             identity_.payer(),
             FlowOf(this),
             options,
             identity_.AccountIn(environment.memory),
             environment.signalled_at_once},
      members_(world_size, environment.node_name),
      layouts_(
          terms_, &members_, environment.max_buckets_per_layout,
          [this](LayoutChannel* layout, std::size_t bucket, const ReduceTimes& times,
                 const absl::Status& failure) {
            // Outlives the transaction, which unlocks the job.
            const auto self = shared_from_this();
            Transaction transaction(this);
            // Other users wait for the reduce thread, and each rank's StepDone names every bucket.
            if (layout->plan().buckets.size() * world_size_ > kToldAtOnce) transaction.FlushLater();
            // Fails the job before the bucket counts as reduced, so that no step with a failed
            // bucket is complete.
            FailLocked(failure);
            layout->Reduced(bucket, times, environment_.clock->NowNs(), transaction.actions());
            MaybeEnd(transaction.actions());
          },
          [this](LayoutChannel* layout, AverageCopy* copy) {
            const auto self = shared_from_this();
            Transaction transaction(this);
            FailLocked(layout->Copied(copy, environment_.clock->NowNs(), transaction.actions()));
            MaybeEnd(transaction.actions());
          },
          [this](LayoutChannel* layout) {
            const auto self = shared_from_this();
            Transaction transaction(this);
            // Each rank's messages have a turn of their own.
            transaction.FlushLater();
            layout->Signalled(environment_.clock->NowNs(), transaction.actions());
            MaybeEnd(transaction.actions());
          }),
      operations_(
          terms_, &members_,
          [this](const absl::Status& failure) {
            const auto self = shared_from_this();
            Transaction transaction(this);
            FailLocked(failure);
            operations_.Reduced(transaction.actions());
            MaybeEnd(transaction.actions());
          },
          [this](const absl::Status& failure) {
            const auto self = shared_from_this();
            Transaction transaction(this);
            FailLocked(failure);
            operations_.Copied(transaction.actions());
            MaybeEnd(transaction.actions());
          }),
      collectives_(world_size),
      healing_(terms_, &members_,
               [this] {
                 const auto self = shared_from_this();
                 Transaction transaction(this);
                 healing_.Copied(environment_.clock->NowNs(), transaction.actions());
                 MaybeEnd(transaction.actions());
               }),
      rules_(terms_, members_, layouts_, operations_, collectives_),
      hold_(terms_, members_, layouts_, operations_) {}

// ---- Joining ------------------------------------------------------------------------------------

absl::Status Job::Join(std::uint32_t rank, std::uint32_t world_size, const JobOptions& options,
                       std::uint64_t incarnation, std::shared_ptr<SessionSink> sink,
                       const std::string& node, PodId pod) {
  MutexLock lock(&mutex_);
  const absl::Status refusal =
      rules_.CheckJoin(rank, world_size, options, phase_ == Phase::kActive);
  if (!refusal.ok()) return refusal;
  const bool comes_back = members_[rank].state == RankState::kHeld;
  members_.Join(rank, incarnation, std::move(sink), node,
                /*loads=*/terms_.options.HealsFromSurvivors(), pod);
  if (comes_back && !members_.AnyIsMissing()) {
    layouts_.ResumeDeadlines(environment_.clock->NowNs());
  }
  return absl::OkStatus();
}

bool Job::NoteOtherToken() {
  MutexLock lock(&mutex_);
  if (phase_ != Phase::kActive || members_.Formed() || members_.other_token()) return false;
  members_.NoteOtherToken();
  return true;
}

void Job::NoteNoPeers() {
  MutexLock lock(&mutex_);
  members_.NoteNoPeers();
}

void Job::UseNodeGroup(std::shared_ptr<Reducer> node_group) {
  MutexLock lock(&mutex_);
  if (node_group_ == nullptr) node_group_ = std::move(node_group);
}

absl::StatusOr<Job::Registration> Job::RegisterLayout(RankSession session, LayoutRequest request) {
  if (NeedsPlan(session, request)) {
    request.plan = PlanLayout(request.spec, environment_.max_buckets_per_layout);
  }
  Transaction transaction(this);
  if (phase_ != Phase::kActive) return end_;
  if (Ended(session)) return absl::AbortedError("the session has ended");
  const auto layout = layouts_.Register(session.rank, std::move(request), transaction.actions());
  if (!layout.ok()) return layout.status();
  return Registration{(*layout)->channel(), (*layout)->plan()};
}

bool Job::NeedsPlan(RankSession session, const LayoutRequest& request) const {
  MutexLock lock(&mutex_);
  return !Ended(session) && layouts_.NeedsPlan(session.rank, request);
}

void Job::RefuseLayout(RankSession session, std::uint32_t channel, const absl::Status& why) {
  Transaction transaction(this);
  if (!Ended(session)) layouts_.Refuse(session.rank, channel, why, transaction.actions());
}

void Job::KeepMemory(RankSession session, std::uint32_t channel, std::shared_ptr<void> memory) {
  Transaction transaction(this);
  LayoutChannel* const layout = layouts_.Find(channel);
  if (layout == nullptr || Ended(session) || !TakesPart(members_[session.rank].state)) {
    transaction.actions()->releases.push_back(std::move(memory));
  } else {
    layout->agreement().KeepMemory(session.rank, std::move(memory), transaction.actions());
  }
}

absl::Status Job::CheckReplaces(RankSession session, std::uint32_t channel) const {
  MutexLock lock(&mutex_);
  if (Ended(session)) return absl::OkStatus();
  return layouts_.CheckReplaces(session.rank, channel);
}

absl::Status Job::ArenaMapped(RankSession session, std::uint32_t channel, RankMemory memory) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  return layouts_.ArenaMapped(session.rank, channel, std::move(memory), transaction.actions());
}

// ---- Steps --------------------------------------------------------------------------------------

absl::Status Job::MarkReady(RankSession session, std::uint32_t channel, std::uint64_t step,
                            absl::Span<const std::uint32_t> buckets,
                            std::optional<Position> position) {
  const std::uint64_t now_ns = environment_.clock->NowNs();
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  const auto layout = layouts_.OfRank(session.rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->MarkReady(session.rank, step, buckets, position, now_ns, transaction.actions());
}

absl::Status Job::EndStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                          absl::string_view used_map, std::optional<Position> position) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  const auto layout = layouts_.OfRank(session.rank, channel);
  if (!layout.ok()) return layout.status();
  NoteOperation(session.rank, step, *layout);
  return (*layout)->EndStep(session.rank, step, used_map, position, environment_.clock->NowNs(),
                            transaction.actions());
}

absl::Status Job::FinishStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                             absl::string_view used_map, std::optional<Position> position) {
  const std::uint64_t now_ns = environment_.clock->NowNs();
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  const auto layout = layouts_.OfRank(session.rank, channel);
  if (!layout.ok()) return layout.status();
  NoteOperation(session.rank, step, *layout);
  return (*layout)->FinishStep(session.rank, step, used_map, position, now_ns,
                               transaction.actions());
}

void Job::NoteOperation(std::uint32_t rank, std::uint64_t step, LayoutChannel* layout) const {
  const bool live = members_[rank].state == RankState::kLive;
  // A rank that heals has called none. Without a live rank no operation begins.
  layout->NoteOperation(step, live ? operations_.LastOf(rank) : operations_.next_sequence() - 1,
                        live);
}

absl::Status Job::AbandonStep(RankSession session, std::uint32_t channel, std::uint64_t step,
                              absl::string_view reason) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  const auto layout = layouts_.OfRank(session.rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->Abandon(session.rank, step, reason, environment_.clock->NowNs(),
                            transaction.actions());
}

absl::Status Job::ReleaseLayout(RankSession session, std::uint32_t channel) {
  const std::uint64_t now_ns = environment_.clock->NowNs();
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  return layouts_.ReleaseLayout(session.rank, channel, now_ns, transaction.actions());
}

// ---- The job's own channel ----------------------------------------------------------------------

absl::Status Job::Operate(RankSession session, std::uint64_t sequence, const OperationSpec& spec,
                          StagingMemory staging, std::uint64_t deadline_ns) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  if (absl::Status bad = rules_.CheckOperation(session.rank, sequence, spec); !bad.ok()) return bad;
  StopIf(hold_.LostRankIsNeeded(sequence, spec), transaction.actions());
  if (Ended(session)) return absl::OkStatus();
  return operations_.Join(session.rank, sequence, spec, std::move(staging), deadline_ns,
                          transaction.actions());
}

absl::Status Job::ChunkWritten(RankSession session, std::uint64_t sequence, std::uint64_t chunk,
                               std::uint64_t bytes) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  if (absl::Status bad = rules_.CheckTakesPart(session.rank, sequence); !bad.ok()) return bad;
  return operations_.ChunkWritten(session.rank, sequence, chunk, bytes, transaction.actions());
}

absl::Status Job::ChunkRead(RankSession session, std::uint64_t sequence, std::uint64_t chunk) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  if (absl::Status bad = rules_.CheckTakesPart(session.rank, sequence); !bad.ok()) return bad;
  return operations_.ChunkRead(session.rank, sequence, chunk, transaction.actions());
}

absl::Status Job::BeginCollective(RankSession session, absl::string_view description) {
  const std::uint32_t rank = session.rank;
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  StopIf(hold_.CollectiveIsNotHeld(rank, description), transaction.actions());
  if (Ended(session)) return absl::OkStatus();
  const auto other = collectives_.Begin(rank, description);
  if (!other.has_value()) return absl::OkStatus();
  StopLocked(MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kOperationMismatch,
      absl::StrCat("the ranks of job '", identity_.job_id, "' disagree on collective ",
                   other->number, ": rank ", members_.Name(other->rank), " called ",
                   other->description, ", rank ", members_.Name(rank), " called ", description,
                   ". Call the same collectives in the same order on every rank."),
      {{field::kJob, identity_.job_id}, {field::kRank, rank}, {field::kOtherRank, other->rank}}));
  MaybeEnd(transaction.actions());
  return absl::OkStatus();
}

absl::Status Job::QueryCollectives(RankSession session, absl::Duration waited) {
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  const auto begun = [this](std::uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return absl::StrCat("begun ", collectives_.Describe(number));
  };
  LateRanks late(members_);
  for (std::uint32_t other = 0; other < members_.world_size(); ++other) {
    const std::uint64_t next = collectives_.Begun(other) + 1;
    if (next > collectives_.Begun(session.rank)) continue;
    if (members_[other].state != RankState::kExited) late.Add(other, next, begun);
  }
  TellLateRanks("a collective", waited, late, {session.rank}, &members_, transaction.actions());
  return absl::OkStatus();
}

// ---- The state of the model ---------------------------------------------------------------------

absl::Status Job::FetchState(RankSession session, StagingMemory staging, std::uint64_t timeout_ns) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "FetchState"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  const std::uint64_t deadline_ns =
      timeout_ns == 0 ? StateHealing::kNoDeadline : environment_.clock->NowNs() + timeout_ns;
  return healing_.Fetch(session.rank, std::move(staging), deadline_ns, transaction.actions());
}

absl::Status Job::OfferState(RankSession session, std::uint64_t transfer, std::uint64_t bytes,
                             StagingMemory staging) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "StateOffer"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  return healing_.Offer(session.rank, transfer, bytes, std::move(staging),
                        environment_.clock->NowNs(), transaction.actions());
}

absl::Status Job::StateWritten(RankSession session, std::uint64_t transfer, std::uint64_t chunk) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "StateWritten"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  return healing_.Written(session.rank, transfer, chunk, environment_.clock->NowNs(),
                          transaction.actions());
}

absl::Status Job::StateRead(RankSession session, std::uint64_t transfer, std::uint64_t chunk) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "StateRead"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  return healing_.Read(session.rank, transfer, chunk, environment_.clock->NowNs(),
                       transaction.actions());
}

absl::Status Job::TakeDigests(RankSession session, std::uint64_t transfer,
                              std::vector<StateDigest> items, ArenaQuota::Reservation charge) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "StateDigests"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  return healing_.TakeDigests(session.rank, transfer, std::move(items), std::move(charge),
                              environment_.clock->NowNs());
}

absl::Status Job::RefuseState(RankSession session, std::uint64_t transfer, absl::string_view why) {
  Transaction transaction(this);
  if (absl::Status bad = rules_.CheckHeals(session.rank, "StateRefused"); !bad.ok()) return bad;
  if (Ended(session)) return absl::OkStatus();
  return healing_.Refuse(session.rank, transfer, why, transaction.actions());
}

void Job::UpdateHealing(DeferredActions* actions) {
  const bool missing = members_.AnyIsMissing();
  const std::uint64_t now_ns = environment_.clock->NowNs();
  const absl::Status diverged = healing_.Update(
      [this](std::uint32_t rank, std::uint32_t replacement)
          ABSL_NO_THREAD_SAFETY_ANALYSIS { return hold_.StandingOf(rank, replacement); },
      now_ns, actions);
  if (missing && !members_.AnyIsMissing()) layouts_.ResumeDeadlines(now_ns);
  StopIf(diverged, actions);
}

// ---- Leaving and losing -------------------------------------------------------------------------

absl::Status Job::Leave(RankSession session, bool exit) {
  const std::uint32_t rank = session.rank;
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  if (absl::Status status = rules_.CheckLeave(rank, exit); !status.ok()) return status;
  if (exit) {
    members_.Exit(rank, environment_.clock->NowNs());
  } else {
    members_.Stay(rank);
  }
  DeferredActions* const actions = transaction.actions();
  layouts_.RankLeft(rank, exit, environment_.clock->NowNs(), actions);
  operations_.RankLeft(actions);
  EndLeavingSessions(actions);
  MaybeResume(actions);
  if (!exit) StopIf(hold_.StaysDuringLoss(rank), actions);
  return absl::OkStatus();
}

absl::Status Job::Finish(RankSession session) {
  const std::uint32_t rank = session.rank;
  Transaction transaction(this);
  if (Ended(session)) return absl::OkStatus();
  if (absl::Status status = rules_.CheckFinish(rank); !status.ok()) return status;
  const std::uint64_t now_ns = environment_.clock->NowNs();
  members_.Finish(rank, now_ns);
  collectives_.Finish(rank);
  layouts_.RankLeft(rank, /*exited=*/true, now_ns, transaction.actions());
  EndLeavingSessions(transaction.actions());
  MaybeResume(transaction.actions());
  return absl::OkStatus();
}

void Job::EndLeavingSessions(DeferredActions* actions) {
  if (hold_.LeaversWait()) return;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    if (members_.IsLeaving(rank)) members_.EndSession(rank, absl::OkStatus(), actions);
  }
}

void Job::HealRanks(DeferredActions* actions) {
  const auto may_heal = [this](std::uint32_t rank) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return !operations_.GoesOnWithout(rank, members_[rank].last_operation);
  };
  for (const std::uint32_t rank : layouts_.HealRanks(may_heal)) {
    const std::uint64_t first = operations_.RankHealed(rank, members_[rank].last_operation);
    members_.Send(rank, HealedMessage{first}, actions);
  }
}

void Job::MaybeResume(DeferredActions* actions) {
  if (resuming_ || members_.stayed().empty() || !members_.AllHaveLeft()) return;
  resuming_ = layouts_.WriteMissedWords(
      [this] {
        const auto self = shared_from_this();
        Transaction transaction(this);
        // Each rank's message has a turn of its own.
        transaction.FlushLater();
        resuming_ = false;
        if (phase_ == Phase::kActive) Resume(transaction.actions());
        MaybeEnd(transaction.actions());
      },
      actions);
  if (!resuming_) Resume(actions);
}

void Job::Resume(DeferredActions* actions) {
  if (members_.stayed().empty()) return;  // they have left for good meanwhile
  // The last rank to leave may have been the last one to have a layout.
  layouts_.DropReleased(actions);
  // No step, agreement or operation can be running: each of them has at least one rank that takes
  // part.
  const LeaveDoneMessage done{members_.stayed().back(), operations_.next_sequence(),
                              layouts_.NextSteps()};
  for (const std::uint32_t rank : members_.Resume()) {
    layouts_.RankResumed(rank);
    operations_.RankResumed(rank);
    members_.Send(rank, done, actions);
  }
}

void Job::Lose(RankSession session, const absl::Status& why) {
  Transaction transaction(this);
  const Member& member = members_[session.rank];
  if (member.incarnation != session.incarnation || member.sink == nullptr) return;
  if (member.state == RankState::kLost) return;
  if (members_.IsLeaving(session.rank)) {
    // It had left for good.
    return members_.EndSession(session.rank, why, transaction.actions());
  }
  absl::Status loss = layouts_.LossOf(session.rank, why);
  if (phase_ == Phase::kActive && terms_.options.Holds()) {
    const std::string ends = hold_.WhyNotHeld(session.rank, why);
    if (ends.empty()) {
      members_.Hold(session.rank, why, transaction.actions());
      layouts_.RankLost(session.rank, environment_.clock->NowNs(), transaction.actions());
      operations_.RankLost(session.rank, transaction.actions());
      return;
    }
    loss = MakeError(loss.code(), DetailsOf(loss),
                     absl::StrCat(loss.message(), " It could not be held, because ", ends, "."));
  }
  members_.Lose(session.rank, why);
  StopLocked(loss);
  MaybeEnd(transaction.actions());
}

void Job::End(const absl::Status& why) {
  Transaction transaction(this);
  if (EmptyLocked() || OnlyWordsAreLeft()) return;  // a job that has ended keeps its result
  StopLocked(why);
  MaybeEnd(transaction.actions());
}

bool Job::EndIfIdle(const absl::Status& why) {
  Transaction transaction(this);
  if (EmptyLocked()) return true;
  if (OnlyWordsAreLeft()) return false;
  if (phase_ == Phase::kActive) {
    // A held step may wait for longer than the daemon has.
    if (layouts_.StepRunning() && !members_.AnyIsMissing()) return false;
    StopLocked(why);
    MaybeEnd(transaction.actions());
  }
  return phase_ == Phase::kEnded;
}

void Job::Retire() {
  DeferredActions actions;
  {
    MutexLock lock(&mutex_);
    charge_.LeaveOrigin();
    layouts_.Retire(&actions);
  }
  ReleaseLater(std::move(actions.releases));
}

void Job::ReleaseLater(std::vector<std::shared_ptr<void>> released) {
  const UserQueue turns = releases();
  for (auto& one : released) turns.Run([one = std::move(one)] {});
}

void Job::StopIf(const absl::Status& why, DeferredActions* actions) {
  if (why.ok()) return;
  StopLocked(why);
  MaybeEnd(actions);
}

void Job::FailLocked(const absl::Status& failure) {
  if (failure.ok()) return;
  ErrorDetails details = DetailsOf(failure);
  if (details.Value(field::kJob).empty()) {
    details.fields.emplace_back(field::kJob.text(), identity_.job_id);
  }
  StopLocked(MakeError(failure.code(), details, failure.message()));
}

void Job::StopLocked(const absl::Status& why) {
  if (phase_ != Phase::kActive) return;
  phase_ = Phase::kEnding;
  end_ = why;
  layouts_.Stop();
  operations_.Stop();
}

void Job::MaybeEnd(DeferredActions* actions) {
  if (phase_ != Phase::kEnding) return;
  healing_.Stop(actions);
  layouts_.GiveUp(actions);
  if (InFlight()) return;
  phase_ = Phase::kEnded;
  layouts_.FinishSeen(environment_.clock->NowNs(), actions);
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member& member = members_[rank];
    absl::Status status = member.state == RankState::kLost ? member.loss : end_;
    // A rank has left well if the others did not need it any more.
    const bool early = DetailsOf(end_).reason == reason::kRankFinished.text();
    if (members_.IsLeaving(rank) && !early) status = absl::OkStatus();
    members_.EndSession(rank, status, actions);
  }
  layouts_.ReleaseMemory(actions);
  operations_.ReleaseMemory();
}

void Job::Tick() {
  Transaction transaction(this);
  // The table may be retiring an empty job. If a step became void now, its work would use layouts
  // that are about to be destroyed.
  if (phase_ != Phase::kActive || EmptyLocked()) return;
  const std::uint64_t now_ns = environment_.clock->NowNs();
  layouts_.Tick(now_ns, transaction.actions());
  operations_.Tick(now_ns, transaction.actions());
  healing_.Tick(now_ns, transaction.actions());
  StopIf(hold_.HeldTooLong(now_ns), transaction.actions());
}

// ---- Asking -------------------------------------------------------------------------------------

bool Job::Ended(RankSession session) const {
  const Member& member = members_[session.rank];
  return phase_ != Phase::kActive || member.sink == nullptr ||
         member.incarnation != session.incarnation;
}

bool Job::InFlight() const {
  return resuming_ || operations_.busy() || layouts_.in_flight() || healing_.busy();
}

std::string Job::MissingInStep(std::uint32_t channel, std::uint64_t step) const {
  MutexLock lock(&mutex_);
  const LayoutChannel* layout = layouts_.Find(channel);
  return layout != nullptr && layout->step() == step ? layout->report().Missing() : "";
}

bool Job::Empty() const {
  MutexLock lock(&mutex_);
  return EmptyLocked();
}

bool Job::EmptyLocked() const { return !InFlight() && !AnyIsSeated(); }

bool Job::OnlyWordsAreLeft() const { return resuming_ && !AnyIsSeated(); }

bool Job::AnyIsSeated() const {
  if (members_[seated_].sink != nullptr) return true;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    if (members_[rank].sink == nullptr) continue;
    seated_ = rank;
    return true;
  }
  return false;
}

bool Job::Formed() const {
  MutexLock lock(&mutex_);
  return members_.Formed();
}

bool Job::IsHeld(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return phase_ == Phase::kActive && rank < world_size_ && members_[rank].state == RankState::kHeld;
}

bool Job::HasCompleted(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return phase_ == Phase::kActive && hold_.HasCompleted(rank);
}

bool Job::HasEnded() const {
  MutexLock lock(&mutex_);
  return phase_ != Phase::kActive;
}

bool Job::StepRunning() const {
  MutexLock lock(&mutex_);
  return phase_ == Phase::kActive && layouts_.StepRunning();
}

bool Job::Replaceable(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return phase_ == Phase::kActive && hold_.Replaceable(rank);
}

std::vector<CurrentLayout> Job::CurrentLayouts(RankSession session) const {
  MutexLock lock(&mutex_);
  if (Ended(session) || !CameBack(members_[session.rank].state)) return {};
  return layouts_.CurrentFor(session.rank);
}

bool Job::WouldHold(RankSession session) const {
  MutexLock lock(&mutex_);
  if (!terms_.options.Holds() || Ended(session)) return false;
  if (!TakesPart(members_[session.rank].state)) return false;
  const absl::Status death = MakeError(absl::StatusCode::kAborted, reason::kProcessEnded, "");
  return hold_.WhyNotHeld(session.rank, death).empty();
}

RankState Job::StateOf(RankSession session) const {
  MutexLock lock(&mutex_);
  const Member& member = members_[session.rank];
  return member.incarnation == session.incarnation ? member.state : RankState::kLost;
}

bool Job::HasRankIn(const PodId& pod) const {
  MutexLock lock(&mutex_);
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member& member = members_[rank];
    if (member.state != RankState::kAbsent && member.pod == pod) return true;
  }
  return false;
}

RankState Job::StateOf(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return rank < world_size_ ? members_[rank].state : RankState::kAbsent;
}

void Job::ListRanks(JobSnapshot* snapshot) const {
  std::vector<bool> awaited(world_size_);
  for (const std::uint32_t rank : layouts_.MissingRanks()) awaited[rank] = true;
  for (const std::uint32_t rank : operations_.MissingRanks()) awaited[rank] = true;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member& member = members_[rank];
    if (member.state == RankState::kAbsent) {
      ++snapshot->missing_ranks_total;
      if (snapshot->missing_ranks.size() < kListedRanks) snapshot->missing_ranks.push_back(rank);
      continue;
    }
    if (awaited[rank]) snapshot->waiting_ranks.push_back(rank);
    if (member.state == RankState::kHeld && phase_ == Phase::kActive) {
      snapshot->held_ranks.push_back(rank);
    }
    const bool former = member.sink == nullptr;
    if (former && member.node.empty()) continue;
    if (former && snapshot->former_ranks.size() >= kListedRanks) {
      ++snapshot->former_ranks_unlisted;
      continue;
    }
    (former ? snapshot->former_ranks : snapshot->ranks)
        .push_back({rank, member.incarnation, member.state, member.node});
  }
}

JobSnapshot Job::Snapshot() const {
  MutexLock lock(&mutex_);
  JobSnapshot snapshot;
  ListRanks(&snapshot);
  if (phase_ != Phase::kActive) {
    snapshot.phase = JobPhase::kFailed;
    snapshot.failure = std::string(end_.message());
  } else if (snapshot.ranks.empty()) {
    snapshot.phase = JobPhase::kEnded;
  } else {
    snapshot.phase = members_.Formed() ? JobPhase::kRunning : JobPhase::kForming;
  }
  snapshot.healing = healing_.Snapshot();
  snapshot.layouts = layouts_.Snapshot();
  snapshot.released_layouts = layouts_.ReleasedSnapshot();
  snapshot.operations = operations_.completed();
  snapshot.operations_failed = operations_.failed();
  return snapshot;
}

std::optional<std::vector<StepTimes>> Job::Timeline(absl::string_view layout,
                                                    std::size_t steps) const {
  MutexLock lock(&mutex_);
  return layouts_.Timeline(layout, steps);
}

}  // namespace gradsync::daemon
