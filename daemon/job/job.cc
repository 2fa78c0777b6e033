#include "daemon/job/job.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

// Limits on the layouts that a job keeps. Clients cannot raise them.
constexpr std::size_t kMaxLayouts = 256;
constexpr std::size_t kMaxBucketRanks = std::size_t{1} << 17;

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
    Reducer* const node_group = job_->node_group_.get();  // set once
    job_->mutex_.Unlock();
    // Wakes the waiters first: the reductions could take their cores.
    for (const auto& sink : actions_.flushes) sink->Flush();
    for (ReduceOperation* reduction : actions_.reductions) {
      job_->ReducerOf(*reduction, node_group)->Reduce(reduction);
    }
    for (const GivenUpStep& step : actions_.given_up) {
      job_->environment_.gpu_reducer->GiveUp(step);
    }
    for (const auto& [rank, why] : actions_.breaches) {
      job_->Lose(rank, job_->IncarnationOf(rank), why);
    }
    for (auto& copy : actions_.copies) job_->environment_.executor->Run(std::move(copy));
    if (!actions_.releases.empty()) {
      job_->environment_.executor->Run([released = std::move(actions_.releases)] {});
    }
  }
  DeferredActions* actions() { return &actions_; }

 private:
  Job* const job_;
  DeferredActions actions_;
};

Reducer* Job::ReducerOf(const ReduceOperation& operation, Reducer* node_group) const {
  if (std::holds_alternative<HostReduction>(operation.work)) return environment_.reducer;
  if (std::holds_alternative<DeviceReduction>(operation.work)) return environment_.gpu_reducer;
  return node_group;
}

Job::Job(JobIdentity identity, std::uint32_t world_size, const JobOptions& options,
         const JobEnvironment& environment)
    : identity_(std::move(identity)),
      world_size_(world_size),
      options_(options),
      environment_(environment),
      terms_{identity_.job_id, FlowOf(this), options.divide_by_world, options.step_timeout_ns,
             options.nccl},
      members_(world_size, environment.node_name),
      operations_(
          terms_, &members_,
          [this](const absl::Status& failure) {
            const auto self = shared_from_this();  // the lock is released after the last reference
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
          }) {}

// ---- Joining ------------------------------------------------------------------------------------

absl::Status Job::Join(std::uint32_t rank, std::uint32_t world_size, const JobOptions& options,
                       std::uint64_t incarnation, std::shared_ptr<SessionSink> sink,
                       const std::string& node) {
  MutexLock lock(&mutex_);
  const auto mismatch = [&](absl::string_view what, auto mine, auto theirs) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kJobMismatch,
                     absl::StrCat("job '", identity_.job_id, "', rank ", rank, ": ", what, " is ",
                                  theirs, ", but the ranks that joined before have ", mine,
                                  ". Start every rank with the same options."),
                     {{field::kJob, identity_.job_id}, {field::kRank, rank}});
  };
  if (world_size != world_size_) return mismatch("world_size", world_size_, world_size);
  if (options.divide_by_world != options_.divide_by_world) {
    const auto name = [](bool world) { return world ? "world" : "live_ranks"; };
    return mismatch("divisor", name(options_.divide_by_world), name(options.divide_by_world));
  }
  if (options.step_timeout_ns != options_.step_timeout_ns) {
    return mismatch("step_timeout_ms", options_.step_timeout_ns / 1'000'000,
                    options.step_timeout_ns / 1'000'000);
  }
  const NcclSettings& nccl = options.nccl;
  const auto name = [](auto choice) {
    const std::string chosen = NcclName(choice);
    return chosen.empty() ? "auto" : chosen;
  };
  if (nccl.max_ctas != options_.nccl.max_ctas) {
    return mismatch("nccl.max_ctas", options_.nccl.max_ctas, nccl.max_ctas);
  }
  if (nccl.algorithm != options_.nccl.algorithm) {
    return mismatch("nccl.algorithm", name(options_.nccl.algorithm), name(nccl.algorithm));
  }
  if (nccl.protocol != options_.nccl.protocol) {
    return mismatch("nccl.protocol", name(options_.nccl.protocol), name(nccl.protocol));
  }
  if (nccl.wire_type != options_.nccl.wire_type) {
    return mismatch("nccl.wire_type", name(options_.nccl.wire_type), name(nccl.wire_type));
  }
  if (!end_.ok() || members_[rank].state != RankState::kAbsent) {
    return MakeError(
        absl::StatusCode::kAlreadyExists, reason::kRankOccupied,
        absl::StrCat("rank ", rank, " of job '", identity_.job_id,
                     "' is held by a live session while the job is still forming. Give "
                     "each trainer its own RANK, or each run its own job_id."),
        {{field::kJob, identity_.job_id}, {field::kRank, rank}});
  }
  Member& member = members_[rank];
  member.state = RankState::kLive;
  member.incarnation = incarnation;
  member.sink = std::move(sink);
  member.node = node;
  formed_ = true;
  for (std::uint32_t other = 0; other < world_size_; ++other) {
    if (members_[other].state == RankState::kAbsent) formed_ = false;
  }
  return absl::OkStatus();
}

void Job::UseNodeGroup(std::shared_ptr<Reducer> node_group) {
  MutexLock lock(&mutex_);
  if (node_group_ == nullptr) node_group_ = std::move(node_group);
}

absl::StatusOr<Job::Registration> Job::RegisterLayout(std::uint32_t rank, LayoutRequest request) {
  Transaction transaction(this);
  if (Ended(rank)) return end_.ok() ? absl::AbortedError("the session has ended") : end_;
  if (members_[rank].state != RankState::kLive) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank, " has left: it cannot register a layout"));
  }
  if (absl::Status left = RanksLeft(request.spec.name); !left.ok()) return left;
  if (absl::Status failed = TakeFailure(rank, request); !failed.ok()) return failed;
  LayoutChannel* layout = FindPending(request);
  if (layout == nullptr) {
    auto begun = BeginAgreement(rank, request);
    if (!begun.ok()) return begun.status();
    layout = *begun;
  }
  absl::Status status =
      layout->agreement().Register(rank, std::move(request), transaction.actions());
  if (!status.ok()) {
    SettleLayouts(transaction.actions());
    return status;
  }
  return Registration{layout->channel(), layout->plan()};
}

LayoutChannel* Job::FindPending(const LayoutRequest& request) const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->ready()) continue;
    const bool same_place =
        request.replaces != 0 && layout->agreement().replaces() == request.replaces;
    if (same_place || layout->name() == request.spec.name) return layout.get();
  }
  return nullptr;
}

absl::StatusOr<LayoutChannel*> Job::BeginAgreement(std::uint32_t rank,
                                                   const LayoutRequest& request) {
  std::size_t kept = 0;
  for (const auto& [channel, layout] : layouts_) {
    // There is at most one replacement of each layout.
    if (layout->ready() || layout->agreement().replaces() == 0) ++kept;
    if (channel == request.replaces || layout->name() != request.spec.name) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kAlreadyRegistered,
        absl::StrCat("rank ", rank, " has registered layout '", request.spec.name,
                     "' already, on channel ", channel,
                     ". Replace it, or give this one another name."),
        {{field::kJob, identity_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
  }
  auto plan = PlanLayout(request.spec, environment_.max_buckets_per_layout);
  if (!plan.ok()) return plan.status();
  if ((request.replaces == 0 && kept >= kMaxLayouts) ||
      plan->buckets.size() * world_size_ > kMaxBucketRanks ||
      last_channel_ == std::numeric_limits<std::uint32_t>::max()) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kQuota,
        absl::StrCat("job '", identity_.job_id, "' has ", kept, " layouts, and this one has ",
                     plan->buckets.size(), " buckets; a job may have ", kMaxLayouts,
                     " layouts, and a layout ", kMaxBucketRanks,
                     " buckets times ranks: raise bucket_cap_bytes"));
  }
  const std::uint32_t channel = ++last_channel_;
  auto& layout = layouts_[channel];
  layout = std::make_unique<LayoutChannel>(
      channel, request.spec, request.replaces, rank, *std::move(plan), terms_, &members_,
      [this](LayoutChannel* reduced, std::size_t bucket, const ReduceTimes& times,
             const absl::Status& failure) {
        const auto self = shared_from_this();
        Transaction transaction(this);
        // Fails the job before the bucket counts as reduced, so that no step with a failed bucket
        // is complete.
        FailLocked(failure);
        reduced->Reduced(bucket, times, environment_.clock->NowNs(), transaction.actions());
        MaybeEnd(transaction.actions());
      });
  return layout.get();
}

absl::Status Job::TakeFailure(std::uint32_t rank, const LayoutRequest& request) {
  for (auto it = failures_.begin(); it != failures_.end(); ++it) {
    if (it->name != request.spec.name || it->replaces != request.replaces || !it->untold[rank]) {
      continue;
    }
    it->untold[rank] = false;
    absl::Status status = it->status;
    const auto& untold = it->untold;
    if (std::find(untold.begin(), untold.end(), true) == untold.end()) failures_.erase(it);
    return status;
  }
  return absl::OkStatus();
}

void Job::RememberFailure(const LayoutChannel& layout) {
  FailedAgreement failure{layout.name(), layout.agreement().replaces(),
                          layout.agreement().failure(), std::vector<bool>(world_size_)};
  bool late = false;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    failure.untold[rank] = members_.InSteps(rank) && !layout.agreement().KnowsFailure(rank);
    late = late || failure.untold[rank];
  }
  if (!late) return;
  if (failures_.size() >= kMaxLayouts) failures_.erase(failures_.begin());
  failures_.push_back(std::move(failure));
}

void Job::SettleLayouts(DeferredActions* actions) {
  if (!end_.ok()) return;  // layouts are kept for status and statistics
  for (auto it = layouts_.begin(); it != layouts_.end();) {
    LayoutChannel& layout = *it->second;
    if (layout.ready()) {
      ++it;
    } else if (layout.agreement().failed()) {
      RememberFailure(layout);
      it = layouts_.erase(it);
    } else if (layout.agreement().Complete()) {
      layout.Begin(Find(layout.agreement().replaces()), actions);
      if (const auto replaced = layouts_.find(layout.agreement().replaces());
          replaced != layouts_.end()) {
        // Also releases the layout's memory, including its arenas.
        actions->releases.emplace_back(std::move(replaced->second));
        layouts_.erase(replaced);
      }
      ++it;
    } else {
      ++it;
    }
  }
}

void Job::RefuseLayout(std::uint32_t rank, std::uint32_t channel, const absl::Status& why) {
  Transaction transaction(this);
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr || Ended(rank)) return;
  layout->agreement().Refuse(rank, why, transaction.actions());
  SettleLayouts(transaction.actions());
}

void Job::Hold(std::uint32_t rank, std::uint32_t channel, std::shared_ptr<void> memory) {
  Transaction transaction(this);
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr || Ended(rank)) {
    transaction.actions()->releases.push_back(std::move(memory));
  } else {
    layout->agreement().Hold(rank, std::move(memory), transaction.actions());
  }
}

absl::Status Job::CheckReplaces(std::uint32_t rank, std::uint32_t channel) const {
  MutexLock lock(&mutex_);
  if (Ended(rank)) return absl::OkStatus();
  const auto layout = ChannelOf(rank, channel);
  if (!layout.ok()) return layout.status();
  const auto breach = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank, " replaces layout '", (*layout)->name(),
                                  "' on channel ", channel, ", ", what),
                     {{field::kJob, identity_.job_id},
                      {field::kRank, rank},
                      {field::kChannel, channel},
                      {field::kStep, (*layout)->step()}});
  };
  if (!(*layout)->ready()) return breach("which is not ready: wait for LayoutReady first");
  if ((*layout)->InStep(rank)) {
    return breach(absl::StrCat("whose step ", (*layout)->step(),
                               " it is in: end or abandon it and wait for StepDone first"));
  }
  return absl::OkStatus();
}

absl::Status Job::ArenaMapped(std::uint32_t rank, std::uint32_t channel, RankMemory memory) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  // The call comes from the executor. The rank may have left or the agreement may have failed in
  // the meantime.
  const bool closed = channel >= 1 && channel <= last_channel_ && Find(channel) == nullptr;
  if (closed || members_[rank].state == RankState::kStayed) return absl::OkStatus();
  LayoutChannel* const layout = Find(channel);
  if (layout == nullptr) return UnknownChannel(rank, channel);
  absl::Status status = layout->agreement().Mapped(rank, std::move(memory));
  SettleLayouts(transaction.actions());
  return status;
}

// ---- Steps --------------------------------------------------------------------------------------

absl::Status Job::UnknownChannel(std::uint32_t rank, std::uint32_t channel) const {
  return MakeError(
      absl::StatusCode::kInvalidArgument, reason::kUnknownChannel,
      absl::StrCat("rank ", rank, ": there is no layout on channel ", channel,
                   channel >= 1 && channel <= last_channel_
                       ? "; it was replaced, or its agreement failed"
                       : ""),
      {{field::kJob, identity_.job_id}, {field::kRank, rank}, {field::kChannel, channel}});
}

bool Job::Replacing(std::uint32_t rank, std::uint32_t channel) const {
  for (const auto& [number, layout] : layouts_) {
    if (!layout->ready() && layout->agreement().replaces() == channel)
      return layout->agreement().Registered(rank);
  }
  return false;
}

absl::StatusOr<LayoutChannel*> Job::ChannelOf(std::uint32_t rank, std::uint32_t channel) const {
  LayoutChannel* layout = Find(channel);
  if (layout == nullptr) return UnknownChannel(rank, channel);
  const auto breach = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank, what),
                     {{field::kJob, identity_.job_id},
                      {field::kRank, rank},
                      {field::kChannel, channel},
                      {field::kStep, layout->step()}});
  };
  if (members_[rank].state != RankState::kLive)
    return breach(" has left: it takes part in no step");
  if (Replacing(rank, channel)) {
    return breach(absl::StrCat(" is replacing layout '", layout->name(), "' on channel ", channel,
                               ": it may not use it until RegisterLayout is answered"));
  }
  return layout;
}

absl::Status Job::MarkReady(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                            absl::Span<const std::uint32_t> buckets) {
  const std::uint64_t now_ns = environment_.clock->NowNs();
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  const auto layout = ChannelOf(rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->MarkReady(rank, step, buckets, now_ns, transaction.actions());
}

absl::Status Job::EndStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                          absl::string_view used_map) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  const auto layout = ChannelOf(rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->EndStep(rank, step, used_map, environment_.clock->NowNs(),
                            transaction.actions());
}

absl::Status Job::FinishStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                             absl::string_view used_map) {
  const std::uint64_t now_ns = environment_.clock->NowNs();
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  const auto layout = ChannelOf(rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->FinishStep(rank, step, used_map, now_ns, transaction.actions());
}

absl::Status Job::AbandonStep(std::uint32_t rank, std::uint32_t channel, std::uint64_t step,
                              absl::string_view reason) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  const auto layout = ChannelOf(rank, channel);
  if (!layout.ok()) return layout.status();
  return (*layout)->Abandon(rank, step, reason, environment_.clock->NowNs(), transaction.actions());
}

// ---- The job's own channel ----------------------------------------------------------------------

absl::Status Job::Operate(std::uint32_t rank, std::uint64_t sequence, const OperationSpec& spec,
                          StagingMemory staging, std::uint64_t deadline_ns) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  if (absl::Status status = CheckTakesPart(rank, sequence); !status.ok()) return status;
  if (spec.kind == OperationKind::kBroadcast && spec.root >= world_size_ &&
      spec.root != kLowestLiveRank) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, reason::kUnknownRank,
        absl::StrCat("broadcast from rank ", spec.root, " in a world of ", world_size_));
  }
  return operations_.Join(rank, sequence, spec, std::move(staging), deadline_ns,
                          transaction.actions());
}

absl::Status Job::ChunkWritten(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk,
                               std::uint64_t bytes) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  if (absl::Status status = CheckTakesPart(rank, sequence); !status.ok()) return status;
  return operations_.ChunkWritten(rank, sequence, chunk, bytes, transaction.actions());
}

absl::Status Job::ChunkRead(std::uint32_t rank, std::uint64_t sequence, std::uint64_t chunk) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  if (absl::Status status = CheckTakesPart(rank, sequence); !status.ok()) return status;
  return operations_.ChunkRead(rank, sequence, chunk, transaction.actions());
}

// ---- Leaving and losing -------------------------------------------------------------------------

absl::Status Job::Leave(std::uint32_t rank, bool exit) {
  Transaction transaction(this);
  if (Ended(rank)) return absl::OkStatus();
  Member& member = members_[rank];
  bool in_step = operations_.InOperation(rank);
  for (const auto& [channel, layout] : layouts_) in_step = in_step || layout->InStep(rank);
  if (in_step || (member.state == RankState::kStayed && !exit)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                     absl::StrCat("rank ", rank,
                                  " said Leave in the middle of a step or operation, "
                                  "or twice"),
                     {{field::kJob, identity_.job_id}, {field::kRank, rank}});
  }
  member.state = exit ? RankState::kExited : RankState::kStayed;
  if (exit) {
    away_.erase(std::remove(away_.begin(), away_.end(), rank), away_.end());
  } else {
    away_.push_back(rank);
  }
  DeferredActions* const actions = transaction.actions();
  const std::uint64_t now_ns = environment_.clock->NowNs();
  for (const auto& [channel, layout] : layouts_) {
    if (!layout->ready() && !exit) layout->agreement().Fail(RanksLeft(layout->name()), actions);
    layout->RankLeft(rank, exit, now_ns, actions);
  }
  SettleLayouts(actions);
  if (exit) {
    members_.Send(rank, SessionEndMessage{absl::OkStatus()}, actions);
    member.sink.reset();
  }
  operations_.RankLeft(actions);
  MaybeResume(actions);
  return absl::OkStatus();
}

void Job::MaybeResume(DeferredActions* actions) {
  if (away_.empty() || members_.StepRanks() > 0) return;
  // No step, agreement or operation can be running: each of them has at least one rank that takes
  // part.
  LeaveDoneMessage done{away_.back(), operations_.next_sequence(), {}};
  for (const auto& [channel, layout] : layouts_) {
    done.next_steps.push_back({channel, layout->step()});
    for (const std::uint32_t rank : away_) layout->RankResumed(rank);
  }
  for (const std::uint32_t rank : away_) {
    members_[rank].state = RankState::kLive;
    operations_.RankResumed(rank);
    members_.Send(rank, done, actions);
  }
  away_.clear();
  failures_.clear();
}

absl::Status Job::RanksLeft(absl::string_view layout) const {
  if (away_.empty()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kRanksLeft,
      absl::StrCat("layout '", layout, "' cannot be agreed: rank ", absl::StrJoin(away_, ", "),
                   " left, and stays until every rank has. Register layouts before "
                   "the first Leave, or after LeaveDone."),
      {{field::kJob, identity_.job_id}, {field::kRank, away_.front()}});
}

absl::Status Job::CheckTakesPart(std::uint32_t rank, std::uint64_t sequence) const {
  if (members_[rank].state == RankState::kLive) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kProtocolViolation,
                   absl::StrCat("rank ", rank, ", operation ", sequence,
                                " of the job's channel: this rank has left, and takes part in "
                                "nothing until LeaveDone"),
                   {{field::kJob, identity_.job_id}, {field::kRank, rank}, {field::kChannel, 0}});
}

absl::Status Job::LossOf(std::uint32_t rank, const absl::Status& why) const {
  std::string where = "between steps";
  std::string channel = "0", step, bucket;
  for (const auto& [number, layout] : layouts_) {
    if (layout->agreement().failed()) continue;
    if (!layout->ready()) {
      where = absl::StrCat("while layout '", layout->name(), "' was being ",
                           layout->agreement().replaces() == 0 ? "agreed" : "replaced");
      channel = absl::StrCat(layout->channel());
      step = bucket = "";
      continue;
    }
    channel = absl::StrCat(layout->channel());
    step = absl::StrCat(layout->step());
    // A rank that has left steps does not have to mark buckets.
    const bool owes = members_.InSteps(rank);
    const auto unmarked = owes ? layout->FirstUnmarked(rank) : std::nullopt;
    bucket = unmarked.has_value() ? absl::StrCat(*unmarked) : "";
    where = absl::StrCat(layout->running() ? "in" : "before", " step ", step, " of layout '",
                         layout->name(), "', ",
                         unmarked.has_value() ? absl::StrCat("bucket ", bucket, " not ready")
                         : owes               ? "every bucket ready"
                                              : "after it had left");
    if (layout->running()) break;
  }
  return MakeError(
      absl::StatusCode::kAborted, reason::kRankLost,
      absl::StrCat("rank ", rank, " of job '", identity_.job_id, "' was lost ", where,
                   "; known because ", why.message(),
                   ". Steps that are not complete are void. Start that rank again and join again "
                   "from every rank."),
      {{field::kJob, identity_.job_id},
       {field::kRank, rank},
       {field::kChannel, channel},
       {field::kStep, step},
       {field::kBucket, bucket}});
}

void Job::Lose(std::uint32_t rank, std::uint64_t incarnation, const absl::Status& why) {
  Transaction transaction(this);
  Member& member = members_[rank];
  if (member.incarnation != incarnation || member.sink == nullptr) return;
  if (member.state == RankState::kExited || member.state == RankState::kLost) return;
  const absl::Status loss = LossOf(rank, why);
  member.state = RankState::kLost;
  member.loss = why;
  StopLocked(loss);
  MaybeEnd(transaction.actions());
}

void Job::End(const absl::Status& why) {
  Transaction transaction(this);
  if (OverLocked()) return;  // a job that has ended keeps its result
  StopLocked(why);
  MaybeEnd(transaction.actions());
}

bool Job::EndIfIdle(const absl::Status& why) {
  Transaction transaction(this);
  if (OverLocked()) return true;
  if (end_.ok()) {
    if (StepRunningLocked()) return false;
    StopLocked(why);
    MaybeEnd(transaction.actions());
  }
  return told_;
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
  if (!end_.ok()) return;
  end_ = why;
  for (const auto& [channel, layout] : layouts_) layout->Stop();
  operations_.Stop();
}

void Job::MaybeEnd(DeferredActions* actions) {
  if (end_.ok() || told_) return;
  for (const auto& [channel, layout] : layouts_) layout->GiveUp(actions);
  if (InFlight() > 0) return;
  told_ = true;
  const std::uint64_t now_ns = environment_.clock->NowNs();
  for (const auto& [channel, layout] : layouts_) layout->FinishSeen(now_ns, actions);
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    Member& member = members_[rank];
    const bool lost = member.state == RankState::kLost;
    members_.Send(rank, SessionEndMessage{lost ? member.loss : end_}, actions);
    member.sink.reset();
  }
  for (const auto& [channel, layout] : layouts_) layout->ReleaseMemory(actions);
  operations_.ReleaseMemory();
}

void Job::Tick() {
  Transaction transaction(this);
  if (!end_.ok()) return;
  const std::uint64_t now_ns = environment_.clock->NowNs();
  for (const auto& [channel, layout] : layouts_) layout->Tick(now_ns, transaction.actions());
  SettleLayouts(transaction.actions());
  operations_.Tick(now_ns, transaction.actions());
}

// ---- Asking -------------------------------------------------------------------------------------

LayoutChannel* Job::Find(std::uint32_t channel) const {
  const auto found = layouts_.find(channel);
  return found == layouts_.end() ? nullptr : found->second.get();
}

bool Job::Ended(std::uint32_t rank) const { return !end_.ok() || members_[rank].sink == nullptr; }

std::size_t Job::InFlight() const {
  std::size_t count = operations_.busy() ? 1 : 0;
  for (const auto& [channel, layout] : layouts_) count += layout->in_flight();
  return count;
}

std::string Job::MissingInStep(std::uint32_t channel, std::uint64_t step) const {
  MutexLock lock(&mutex_);
  const LayoutChannel* layout = Find(channel);
  return layout != nullptr && layout->step() == step ? layout->Missing() : "";
}

bool Job::Over() const {
  MutexLock lock(&mutex_);
  return OverLocked();
}

bool Job::OverLocked() const {
  if (InFlight() > 0) return false;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    if (members_[rank].sink != nullptr) return false;
  }
  return true;
}

bool Job::Formed() const {
  MutexLock lock(&mutex_);
  return formed_;
}

bool Job::HasEnded() const {
  MutexLock lock(&mutex_);
  return !end_.ok();
}

bool Job::StepRunning() const {
  MutexLock lock(&mutex_);
  return end_.ok() && StepRunningLocked();
}

bool Job::StepRunningLocked() const {
  for (const auto& [channel, layout] : layouts_) {
    if (layout->running()) return true;
  }
  return false;
}

std::uint64_t Job::IncarnationOf(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return members_[rank].incarnation;
}

bool Job::LiveHere(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  if (rank >= world_size_) return false;
  const Member& member = members_[rank];
  // A job that has ended keeps the states of its ranks, but not their sessions.
  return member.sink != nullptr && member.node.empty() &&
         (member.state == RankState::kLive || member.state == RankState::kStayed);
}

RankState Job::StateOf(std::uint32_t rank) const {
  MutexLock lock(&mutex_);
  return rank < world_size_ ? members_[rank].state : RankState::kAbsent;
}

JobSnapshot Job::Snapshot() const {
  MutexLock lock(&mutex_);
  JobSnapshot snapshot;
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    const Member& member = members_[rank];
    if (member.sink == nullptr && member.state == RankState::kAbsent) {
      snapshot.missing_ranks.push_back(rank);
    } else {
      (member.sink != nullptr ? snapshot.ranks : snapshot.former_ranks)
          .push_back({rank, member.incarnation, member.state == RankState::kStayed, member.node});
    }
  }
  if (!end_.ok()) {
    snapshot.phase = JobPhase::kFailed;
    snapshot.failure = std::string(end_.message());
  } else if (snapshot.ranks.empty()) {
    snapshot.phase = JobPhase::kEnded;
  } else {
    snapshot.phase = formed_ ? JobPhase::kRunning : JobPhase::kForming;
  }
  for (const auto& [channel, layout] : layouts_) {
    snapshot.layouts.push_back({layout->name(), layout->channel(), layout->plan().fingerprint,
                                layout->spec().parameters.size(), layout->plan().buckets.size(),
                                layout->plan().arena_bytes, layout->step(), layout->Missing(),
                                layout->ready(), layout->stats().Snapshot()});
  }
  std::set<std::uint32_t> waiting;
  const auto add = [&waiting](const std::vector<std::uint32_t>& ranks) {
    waiting.insert(ranks.begin(), ranks.end());
  };
  for (const auto& [channel, layout] : layouts_) add(layout->MissingRanks());
  add(operations_.MissingRanks());
  snapshot.waiting_ranks.assign(waiting.begin(), waiting.end());
  snapshot.operations = operations_.completed();
  snapshot.operations_failed = operations_.failed();
  return snapshot;
}

std::optional<std::vector<StepTimes>> Job::Timeline(absl::string_view layout,
                                                    std::size_t steps) const {
  MutexLock lock(&mutex_);
  for (const auto& [channel, candidate] : layouts_) {
    if (candidate->name() == layout) return candidate->timeline().Last(steps);
  }
  return std::nullopt;
}

}  // namespace gradsync::daemon
