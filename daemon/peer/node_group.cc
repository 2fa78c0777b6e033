#include "daemon/peer/node_group.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/peer/peer_status.h"

namespace gradsync::daemon {
namespace {

// How long the end of a lost node's stream may take to arrive.
constexpr std::uint64_t kStreamEndPatienceNs = 500'000'000;

// What a message or a turn may cost: about a quarter of a millisecond. A launch counts as much as
// kLaunchCost ranks.
constexpr std::size_t kPieceCost = 4096;
constexpr std::size_t kLaunchCost = 64;

// Why a job whose engine has failed ends.
absl::Status EngineFailure(const std::string& job_id, const absl::Status& why) {
  const ErrorDetails details = DetailsOf(why);
  // An error about something that is used up would say that the session lives.
  const bool no_reason = details.reason.empty() || absl::IsResourceExhausted(why);
  const Reason reason = no_reason ? reason::kEngineFailed : Reason(details.reason);
  return MakeError(
      absl::StatusCode::kUnavailable, reason,
      absl::StrCat("job '", job_id, "': the engine between its nodes has failed: ", why.message(),
                   ". Its running steps are void. Join again from every rank."),
      {{field::kJob, job_id}, {field::kNode, details.Value(field::kNode)}});
}

absl::Status NodeIsBeingLost() { return absl::CancelledError("a node of the job is being lost"); }

}  // namespace

// The reducer of one job, which owns it.
class NodeGroup::JobReducer final : public Reducer {
 public:
  JobReducer(std::shared_ptr<NodeGroup> node_group, Job* job)
      : node_group_(std::move(node_group)), job_(job) {}
  void Reduce(ReduceOperation* operation) override {
    ReduceAll(absl::MakeConstSpan(&operation, 1));
  }
  void ReduceAll(absl::Span<ReduceOperation* const> operations) override {
    node_group_->Launch(job_, operations);
  }

 private:
  const std::shared_ptr<NodeGroup> node_group_;
  Job* const job_;
};

NodeGroup::NodeGroup(JobKey key, NodeGroupEnvironment environment)
    : key_(std::move(key)),
      environment_(std::move(environment)),
      epochs_(key_.job_id, &environment_) {}

void NodeGroup::AddRank(const std::shared_ptr<Job>& job, std::uint32_t rank,
                        const std::shared_ptr<NodeLink>& link, std::uint64_t incarnation) {
  job->UseNodeGroup(std::make_shared<JobReducer>(shared_from_this(), job.get()));
  MutexLock lock(&mutex_);
  Entry& entry = jobs_.try_emplace(job.get(), &rank_counts_).first->second;
  if (entry.job.lock() != job) {
    entry.job = job;
    entry.ranks.Clear();
    entry.failure = absl::OkStatus();
  }
  entry.ranks.Put(rank, LinkedRank{link, incarnation});
}

// ---- Launches

void NodeGroup::Launch(Job* job, absl::Span<ReduceOperation* const> operations) {
  {
    MutexLock lock(&mutex_);
    Launches& launches = waiting_.emplace_back();
    launches.job = job->shared_from_this();
    launches.operations.assign(operations.begin(), operations.end());
  }
  Advance();
}

void NodeGroup::Advance() {
  while (LaunchPiece()) {
  }
}

bool NodeGroup::LaunchPiece() {
  Actions actions;
  Piece piece;
  {
    MutexLock lock(&mutex_);
    CloseDetachingLocked(&actions);
    if (detaching_.empty() && !has_turn_) piece = TakePieceLocked();
  }
  if (piece.empty()) {
    Run(std::move(actions));
    return false;
  }
  for (Launches& launches : piece) launches.ended = launches.job->HasEnded();
  bool again = false;
  {
    MutexLock lock(&mutex_);
    if (detaching_.empty()) {
      for (const Launches& launches : piece) LaunchLocked(launches, &actions);
    } else {
      waiting_.insert(waiting_.begin(), std::make_move_iterator(piece.begin()),
                      std::make_move_iterator(piece.end()));
    }
    const bool rest = detaching_.empty() && !waiting_.empty() && !has_turn_;
    again = rest && shut_down_;  // since the piece was taken: no turn may follow
    if (rest && !shut_down_) {
      has_turn_ = true;
      // With the lock: after Shutdown() the executor may be gone.
      environment_.executor->Run(waiting_.front().job->identity().payer(),
                                 [self = shared_from_this()] { self->TakeTurn(); });
    }
  }
  Run(std::move(actions));
  return again;
}

void NodeGroup::TakeTurn() {
  {
    MutexLock lock(&mutex_);
    has_turn_ = false;
  }
  Advance();
}

NodeGroup::Piece NodeGroup::TakePieceLocked() {
  Piece piece;
  std::size_t cost = 0;
  while (!waiting_.empty()) {
    Launches& first = waiting_.front();
    auto end = first.operations.begin();
    // After Shutdown() all of them are refused, which costs little.
    while (end != first.operations.end() && (cost < kPieceCost || shut_down_)) {
      cost += kLaunchCost + (*end)->ranks.size();
      ++end;
    }
    if (end != first.operations.end()) {
      if (end != first.operations.begin()) {
        Launches& part = piece.emplace_back();
        part.job = first.job;
        part.operations.assign(first.operations.begin(), end);
        first.operations.erase(first.operations.begin(), end);
      }
      return piece;
    }
    piece.push_back(std::move(first));
    waiting_.pop_front();
  }
  return piece;
}

void NodeGroup::Run(Actions actions) {
  for (const FailedEpoch& failed : actions.failed) {
    const absl::Status why = failed.epoch->failure();
    const NodeLinks& links = failed.epoch->links();
    LogLimitedByAddress(LogLevel::kWarning, "engine failed",
                        {{"job", key_.job_id},
                         {"uid", key_.uid},
                         {"epoch", failed.epoch->epoch()},
                         {"address", links.empty() ? "" : links.front()->address()},
                         {"why", why.message()}});
    for (const auto& job : failed.jobs) job->End(EngineFailure(key_.job_id, why));
    failed.epoch->Abort(why);
    MutexLock lock(&mutex_);
    failed.epoch->EndUse();
    if (epochs_.current() == failed.epoch) epochs_.Retire(&actions.flush);
    epochs_.Reap();
  }
  for (const auto& [job, why] : actions.ended) job->End(why);
  for (const auto& link : actions.flush) link->Flush();
  for (const auto& link : actions.close) link->Close(absl::OkStatus());
  for (const auto& link : actions.late) CloseLate(link.get());
  for (const Refused& refused : actions.refused) {
    const std::uint64_t now_ns = environment_.clock->NowNs();
    LaunchRecord launch;
    launch.operation = refused.operation;
    launch.failure = refused.why;
    launch.times = {now_ns, now_ns};
    Finish(launch);
  }
  for (const LaunchRecord& launch : actions.finished) Finish(launch);
}

void NodeGroup::CloseLate(NodeLink* link) const {
  const absl::Status why = MakeError(
      absl::StatusCode::kDeadlineExceeded, reason::kEngineTimeout,
      absl::StrCat("node ", link->node_name(), " of job '", key_.job_id,
                   "' answers pings, but has not answered a launch for minutes: its daemon hangs. ",
                   "Restart gradsyncd on that node"),
      {{field::kNode, link->node_name()}, {field::kJob, key_.job_id}});
  LogLimitedByAddress(LogLevel::kWarning, "node disconnected",
                      {{"job", key_.job_id},
                       {"uid", key_.uid},
                       {"node", link->node_name()},
                       {"address", link->address()},
                       {"why", why.message()}});
  link->Close(why);
}

void NodeGroup::LaunchLocked(const Launches& launches, Actions* actions) {
  const auto found = jobs_.find(launches.job.get());
  Entry unknown(&rank_counts_);
  Entry& entry = found == jobs_.end() ? unknown : found->second;
  const JobIdentity& identity = launches.job->identity();
  const MemoryAccount account = identity.AccountIn(environment_.memory);
  std::shared_ptr<EngineEpoch> epoch;  // nearly always one for all of them
  EngineEpoch::LaunchDone done;
  const ReduceOperation* whole = nullptr;  // the last one whose ranks are all there
  for (ReduceOperation* const operation : launches.operations) {
    absl::Status why = WhyRefused(launches, entry);
    const bool like_before = whole != nullptr && whole->ranks == operation->ranks;
    if (why.ok() && !like_before && !EngineEpoch::HasEveryRank(*operation, entry.ranks.all())) {
      // Its node is being lost, and the job with it.
      why = NodeIsBeingLost();
    } else if (why.ok() && (epoch == nullptr || !epoch->failure().ok())) {
      auto met = EpochForLocked(entry.ranks.links(), identity, actions);
      if (met.ok()) {
        epoch = *std::move(met);
        done = DoneOf(epoch->epoch());
        actions->flush.insert(actions->flush.end(), epoch->links().begin(), epoch->links().end());
      } else if (absl::IsResourceExhausted(met.status())) {
        entry.failure = met.status();
        why = EngineFailure(key_.job_id, entry.failure);
        actions->ended.emplace_back(launches.job, why);
      } else {
        why = NodeIsBeingLost();
      }
    }
    if (!why.ok()) {
      actions->refused.push_back({launches.job, operation, std::move(why)});
      continue;
    }
    whole = operation;
    std::uint64_t number = 0;
    const absl::Status submitted =
        epoch->Launch(operation, launches.job, account, entry.ranks.all(), done, &number);
    if (!submitted.ok()) AnswerLocked(epoch, nullptr, number, {submitted, {}, false, {}}, actions);
  }
}

absl::Status NodeGroup::WhyRefused(const Launches& launches, const Entry& entry) const {
  if (launches.ended) return absl::CancelledError("the job has ended");
  // The job may hear of it before it is ended.
  return entry.failure.ok() ? absl::OkStatus() : EngineFailure(key_.job_id, entry.failure);
}

EngineEpoch::LaunchDone NodeGroup::DoneOf(std::uint64_t epoch) {
  return [self = shared_from_this(), epoch](std::uint64_t number, const absl::Status& status,
                                            const std::optional<GradientStats>& stats) {
    (void)self->Answered(epoch, nullptr, number, {status, stats, false, {}});
  };
}

absl::Status NodeGroup::LaunchDone(NodeLink* link, const v1::LaunchDone& message) {
  absl::Status status;
  if (message.status().code() != 0) status = StatusFromPeer(message.status());
  if (message.sequence() == 0 && !status.ok()) return Suspect(message.epoch(), link, status);
  LaunchAnswer answer;
  answer.status = std::move(status);
  // A node without ranks in the launch has measured nothing.
  if (message.sum_of_squares() != 0 || message.non_finite() != 0) {
    answer.stats = GradientStats{message.sum_of_squares(), message.non_finite()};
  }
  return Answered(message.epoch(), link, message.sequence(), std::move(answer));
}

absl::Status NodeGroup::Answered(std::uint64_t epoch, NodeLink* link, std::uint64_t launch,
                                 LaunchAnswer answer) {
  answer.times.finish_ns = environment_.clock->NowNs();
  Actions actions;
  {
    MutexLock lock(&mutex_);
    const auto found = epochs_.Find(epoch, link, "LaunchDone");
    if (!found.ok() || *found == nullptr) return found.status();
    // After a failure the node may answer what Lost() has already answered for it.
    if (!(*found)->ledger().Owes(link, launch) && link != nullptr && answer.status.ok() &&
        (*found)->failure().ok()) {
      return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                       absl::StrCat("node ", link->node_name(), " answered launch ", launch,
                                    ", which it does not owe"));
    }
    AnswerLocked(*found, link, launch, answer, &actions);
  }
  Run(std::move(actions));
  Advance();
  return absl::OkStatus();
}

void NodeGroup::AnswerLocked(const std::shared_ptr<EngineEpoch>& epoch, NodeLink* link,
                             std::uint64_t launch, const LaunchAnswer& answer, Actions* actions) {
  if (!answer.status.ok()) FailLocked(epoch, answer.status, actions);
  std::optional<LaunchRecord> finished = epoch->ledger().Answer(link, launch, answer);
  if (!finished.has_value()) return;
  if (finished->failure.ok()) finished->failure = epoch->failure();
  if (!finished->failure.ok()) finished->failure = EngineFailure(key_.job_id, finished->failure);
  actions->finished.push_back(*std::move(finished));
  epochs_.Reap();
}

// ---- The engine

absl::StatusOr<std::shared_ptr<EngineEpoch>> NodeGroup::EpochForLocked(const NodeLinks& links,
                                                                       const JobIdentity& job,
                                                                       Actions* actions) {
  const auto suspected = [this] {
    return [weak = weak_from_this()](std::uint64_t epoch, const absl::Status& why) {
      if (const auto self = weak.lock()) (void)self->Suspect(epoch, nullptr, why);
    };
  };
  return epochs_.EpochFor(links, job, suspected, &actions->flush);
}

absl::Status NodeGroup::Suspect(std::uint64_t epoch, const NodeLink* link,
                                const absl::Status& why) {
  Actions actions;
  {
    MutexLock lock(&mutex_);
    const auto found = epochs_.Find(epoch, link, "LaunchDone");
    if (!found.ok() || *found == nullptr) return found.status();
    if ((*found)->ledger().empty()) {
      (*found)->Suspect(why);
    } else {
      FailLocked(*found, why, &actions);
    }
  }
  Run(std::move(actions));
  return absl::OkStatus();
}

void NodeGroup::FailLocked(const std::shared_ptr<EngineEpoch>& epoch, const absl::Status& why,
                           Actions* actions) {
  if (!epoch->failure().ok()) return;
  epoch->Fail(why);
  epoch->BeginUse();
  FailedEpoch failed{epoch, {}};
  for (const auto& owner : epoch->ledger().Owners()) {
    failed.jobs.insert(std::static_pointer_cast<Job>(owner));
  }
  for (auto& [raw, entry] : jobs_) {
    auto job = entry.job.lock();
    const bool uses = failed.jobs.count(job) > 0 || entry.ranks.links() == epoch->links();
    if (job == nullptr || !uses) continue;
    // From now on: a launch of this job before its end would make the nodes connect once more.
    entry.failure = why;
    failed.jobs.insert(std::move(job));
  }
  actions->failed.push_back(std::move(failed));
}

// ---- Nodes that leave

void NodeGroup::Detach(const std::shared_ptr<NodeLink>& link) {
  {
    MutexLock lock(&mutex_);
    detaching_.push_back(link);
  }
  Advance();
}

void NodeGroup::CloseDetachingLocked(Actions* actions) {
  const std::shared_ptr<EngineEpoch>& current = epochs_.current();
  if (current != nullptr && !current->ledger().empty()) return;
  bool member = false;
  for (const auto& link : detaching_) {
    ForgetLocked(link.get());
    member = member || (current != nullptr && current->Includes(link.get()));
    actions->close.push_back(link);
  }
  detaching_.clear();
  if (member) epochs_.Retire(&actions->flush);
}

void NodeGroup::ForgetLocked(const NodeLink* link) {
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    CountedRanks& ranks = it->second.ranks;
    ranks.Forget(link);
    it = ranks.all().empty() ? jobs_.erase(it) : std::next(it);
  }
}

void NodeGroup::Lost(NodeLink* link, const absl::Status& why) {
  Actions actions;
  {
    MutexLock lock(&mutex_);
    // If all ranks of the node had left, their job continues without it.
    ForgetLocked(link);
    late_.erase(link);
    const auto is_it = [link](const auto& other) { return other.get() == link; };
    detaching_.erase(std::remove_if(detaching_.begin(), detaching_.end(), is_it), detaching_.end());
    const std::uint64_t now_ns = environment_.clock->NowNs();
    for (const auto& epoch : epochs_.EpochsOf(link)) {
      FailLocked(epoch, why, &actions);
      for (const std::uint64_t launch : epoch->ledger().OwedBy(link)) {
        AnswerLocked(epoch, link, launch, {why, {}, false, {0, now_ns}}, &actions);
      }
    }
  }
  Run(std::move(actions));
  Advance();
}

// ---- The nodes' rendezvous

absl::StatusOr<std::shared_ptr<Rendezvous>> NodeGroup::StoreOf(std::uint64_t epoch,
                                                               const NodeLink* link) {
  MutexLock lock(&mutex_);
  return epochs_.StoreOf(epoch, link);
}

absl::Status NodeGroup::RendezvousSet(NodeLink* link, const v1::RendezvousSet& message) {
  const auto store = StoreOf(message.epoch(), link);
  if (!store.ok() || *store == nullptr) return store.status();
  return (*store)->Put(message.key(), message.value());
}

absl::Status NodeGroup::RendezvousGet(const std::shared_ptr<NodeLink>& link,
                                      const v1::RendezvousGet& message) {
  const auto store = StoreOf(message.epoch(), link.get());
  if (!store.ok() || *store == nullptr) return store.status();
  return (*store)->When(message.key(),
                        [weak = std::weak_ptr<NodeLink>(link), epoch = message.epoch(),
                         key = message.key()](const std::string& value) {
                          const auto to = weak.lock();
                          if (to == nullptr) return;
                          v1::AttachResponse answer;
                          answer.mutable_rendezvous_value()->set_epoch(epoch);
                          answer.mutable_rendezvous_value()->set_key(key);
                          answer.mutable_rendezvous_value()->set_value(value);
                          to->Queue(std::move(answer));
                          to->Flush();
                        });
}

void NodeGroup::Tick() {
  std::set<const Job*> ended;
  std::set<const Job*> formed;  // full jobs
  const auto jobs = Jobs();
  for (const auto& job : jobs) {
    if (job->Empty()) {
      ended.insert(job.get());
    } else if (job->Formed() && !job->HasEnded()) {
      formed.insert(job.get());
    }
  }
  Actions actions;
  {
    MutexLock lock(&mutex_);
    if (const auto current = epochs_.current(); current != nullptr) {
      const absl::Status why = current->SuspectedFor(kStreamEndPatienceNs);
      if (!why.ok()) FailLocked(current, why, &actions);
    }
    // Two generations of a job can be full: ranks of the older one have not finished yet. If their
    // nodes differ, the engine stays that of one of them, until the other one launches.
    const auto current = epochs_.current();
    bool kept = false;
    const Job* newest = nullptr;
    for (const auto& [job, entry] : jobs_) {
      if (formed.count(job) == 0 || !entry.failure.ok()) continue;
      kept = kept || (current != nullptr && current->failure().ok() &&
                      current->links() == entry.ranks.links());
      if (newest == nullptr || job->identity().generation > newest->identity().generation) {
        newest = job;
      }
    }
    if (!kept && newest != nullptr) {
      // If there were too many new ones, a later tick makes it.
      EpochForLocked(jobs_.at(newest).ranks.links(), newest->identity(), &actions).IgnoreError();
    }
    for (auto it = jobs_.begin(); it != jobs_.end();) {
      const auto& [job, entry] = *it;
      it = ended.count(job) > 0 || entry.job.expired() ? jobs_.erase(it) : std::next(it);
    }
    for (auto& link : epochs_.LateNodes()) {
      if (late_.insert(link.get()).second) actions.late.push_back(std::move(link));
    }
  }
  Run(std::move(actions));
}

void NodeGroup::Shutdown() {
  Actions actions;
  {
    MutexLock lock(&mutex_);
    shut_down_ = true;
    epochs_.Close(&actions.flush);
  }
  Run(std::move(actions));
}

NodeGroup::Need NodeGroup::NeedOf(const NodeLink* link) {
  MutexLock lock(&mutex_);
  if (rank_counts_.Of(link) > 0) return Need::kRanks;
  return epochs_.EpochsOf(link).empty() ? Need::kNothing : Need::kEngine;
}

bool NodeGroup::Idle() {
  MutexLock lock(&mutex_);
  return jobs_.empty();
}

std::uint64_t NodeGroup::engines_made() {
  MutexLock lock(&mutex_);
  return epochs_.made();
}

JobNodes NodeGroup::NodesOf(const Job& job) {
  MutexLock lock(&mutex_);
  JobNodes nodes;
  const auto found = jobs_.find(&job);
  if (found == jobs_.end()) return nodes;
  const NodeLinks& links = found->second.ranks.links();
  for (const auto& link : links) {
    NodeSnapshot& node = nodes.others.emplace_back();
    node.name = link->node_name();
    node.address = link->address();
    node.heard_ns = link->heard_ns();
    for (const auto& [rank, remote] : found->second.ranks.all()) {
      if (remote.link == link) node.ranks.push_back(rank);
    }
  }
  const std::shared_ptr<EngineEpoch>& current = epochs_.current();
  if (current != nullptr && current->links() == links) {
    nodes.engine = EngineSnapshot{current->epoch(), current->node_names(), current->settings(),
                                  environment_.encrypted, current->Statistics()};
  }
  return nodes;
}

std::vector<std::shared_ptr<Job>> NodeGroup::Jobs() {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Job>> jobs;
  for (const auto& [raw, entry] : jobs_) {
    if (auto job = entry.job.lock()) jobs.push_back(std::move(job));
  }
  return jobs;
}

}  // namespace gradsync::daemon
