#include "daemon/peer/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/engine/local_address.h"
#include "daemon/peer/rank_messages.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync {
namespace {

// For the stream of a node that has ended to say so.
constexpr std::uint64_t kStreamEndPatienceNs = 500'000'000;

// The end of a job whose engine has failed.
absl::Status EngineFailure(const std::string& job_id, const absl::Status& why) {
  const ErrorDetails details = DetailsOf(why);
  std::string node;
  for (const auto& [key, value] : details.fields) {
    if (key == "node") node = value;
  }
  return MakeError(
      absl::StatusCode::kUnavailable, details.reason.empty() ? "ENGINE_FAILED" : details.reason,
      absl::StrCat("job '", job_id, "': the engine between its nodes has failed: ", why.message(),
                   ". Its running steps are void. Join again from every rank."),
      {{"job", job_id}, {"node", node}});
}

}  // namespace

// A job's way to its nodes. The job holds it.
class Cluster::JobReducer final : public Reducer {
 public:
  JobReducer(std::shared_ptr<Cluster> cluster, Job* job)
      : cluster_(std::move(cluster)), job_(job) {}
  void Reduce(ReduceOperation* operation) override { cluster_->Launch(job_, operation); }

 private:
  const std::shared_ptr<Cluster> cluster_;
  Job* const job_;
};

Cluster::Cluster(JobKey key, ClusterEnvironment environment)
    : key_(std::move(key)), environment_(std::move(environment)) {}

void Cluster::AddRank(const std::shared_ptr<Job>& job, std::uint32_t rank,
                      const std::shared_ptr<NodeLink>& link, std::uint64_t incarnation) {
  job->UseCluster(std::make_shared<JobReducer>(shared_from_this(), job.get()));
  MutexLock lock(&mutex_);
  Entry& entry = jobs_[job.get()];
  if (entry.job.lock() != job) entry = Entry{job, {}};
  entry.seats[rank] = Seat{link, incarnation};
}

Cluster::Links Cluster::LinksOfLocked(const Entry& entry) const {
  Links links;  // by their first rank
  for (const auto& [rank, seat] : entry.seats) {
    if (std::find(links.begin(), links.end(), seat.link) == links.end()) {
      links.push_back(seat.link);
    }
  }
  return links;
}

std::shared_ptr<Cluster::Epoch> Cluster::EpochForLocked(const Links& links, Links* told) {
  if (shut_down_) return nullptr;
  if (current_ != nullptr && current_->failure.ok() && current_->links == links) return current_;
  if (current_ != nullptr) RetireLocked(current_, told);
  auto epoch = std::make_shared<Epoch>();
  epoch->number = ++last_epoch_;
  epoch->links = links;
  epoch->store = std::make_shared<Rendezvous>();
  EngineSpec spec;
  spec.address = environment_.address;
  if (spec.address.empty()) {
    // As the first of the others reaches it; what is wrong with it, connecting says.
    spec.address = LocalAddressTowards(links.front()->address()).value_or("");
  }
  spec.settings = environment_.engine;
  spec.node_names = {environment_.node_name};
  for (const auto& link : links) spec.node_names.push_back(link->node_name());
  epoch->node_names = spec.node_names;
  std::string names;
  for (const std::string& name : spec.node_names)
    absl::StrAppend(&names, names.empty() ? "" : ",", name);
  Log(LogLevel::kInfo, "nodes meet",
      {{"job", key_.job_id}, {"epoch", epoch->number}, {"nodes", names}});
  for (std::uint32_t node = 1; node <= links.size(); ++node) {
    v1::AttachResponse message;
    auto* connect = message.mutable_connect_engine();
    connect->set_epoch(epoch->number);
    connect->set_node(node);
    *connect->mutable_node_names() = {spec.node_names.begin(), spec.node_names.end()};
    connect->set_address(links[node - 1]->address());
    connect->set_lanes(static_cast<std::uint32_t>(spec.settings.lanes));
    connect->set_chunk_bytes(spec.settings.chunk_bytes);
    connect->set_wire_type(static_cast<v1::WireType>(spec.settings.wire));
    connect->set_silence_limit_ms(
        static_cast<std::uint64_t>(absl::ToInt64Milliseconds(spec.settings.silence_limit)));
    links[node - 1]->Queue(std::move(message));
    told->push_back(links[node - 1]);
  }
  spec.failed = [weak = weak_from_this(), number = epoch->number](const absl::Status& why) {
    if (const auto self = weak.lock()) (void)self->Suspect(number, nullptr, why);
  };
  epoch->exchange = std::make_unique<NodeExchange>(
      [make = environment_.make_engine, spec, store = epoch->store]() mutable {
        spec.store = store.get();
        return make(spec);
      },
      spec.failed);
  current_ = epoch;
  return epoch;
}

void Cluster::RetireLocked(const std::shared_ptr<Epoch>& epoch, Links* told) {
  if (epoch->failure.ok()) epoch->failure = absl::CancelledError("other nodes meet");
  for (const auto& link : epoch->links) {
    v1::AttachResponse message;
    message.mutable_engine_end()->set_epoch(epoch->number);
    *message.mutable_engine_end()->mutable_status() = ToProto(epoch->failure);
    link->Queue(std::move(message));
    told->push_back(link);
  }
  epoch->store->Cancel(epoch->failure);
  epoch->retired = true;
  retired_.push_back(epoch);
  if (current_ == epoch) current_ = nullptr;
  ReapLocked();
}

void Cluster::ReapLocked() {
  for (auto it = retired_.begin(); it != retired_.end();) {
    const std::shared_ptr<Epoch>& epoch = *it;
    if (!epoch->reaped && epoch->users == 0) {
      epoch->reaped = true;
      // Waits for what this node has in flight; Done() finds the epoch here until all have.
      environment_.reaper->Run([epoch, why = epoch->failure] {
        epoch->exchange->Abort(why);
        epoch->exchange.reset();
      });
    }
    it = epoch->reaped && epoch->in_flight.empty() ? retired_.erase(it) : std::next(it);
  }
}

std::shared_ptr<Cluster::Epoch> Cluster::FindLocked(std::uint64_t number) {
  if (current_ != nullptr && current_->number == number) return current_;
  for (const auto& epoch : retired_) {
    if (epoch->number == number) return epoch;
  }
  return nullptr;
}

void Cluster::Launch(Job* raw, ReduceOperation* operation) {
  const std::shared_ptr<Job> job = raw->shared_from_this();
  const auto refuse = [&] {
    const std::uint64_t now_ns = environment_.clock->NowNs();
    operation->failure = absl::CancelledError("a node of the job is being lost");
    operation->done({now_ns, now_ns});
  };
  if (job->Failed()) return refuse();
  Launched launched;
  bool may = true;
  {
    MutexLock lock(&mutex_);
    if (!detaching_.empty()) {
      held_.push_back({job, operation});
      return;
    }
    const auto found = jobs_.find(raw);
    const Entry entry = found == jobs_.end() ? Entry{job, {}} : found->second;
    may = !entry.failing;
    for (std::size_t i = 0; i < operation->ranks.size(); ++i) {
      // Without a seat its node is being lost, and the job with it.
      may = may && (operation->buffers[i] != nullptr || entry.seats.count(operation->ranks[i]) > 0);
    }
    may = may && LaunchLocked(job, operation, entry, &launched);
  }
  if (!may) return refuse();
  for (const auto& link : launched.told) link->Flush();
  if (!launched.submitted.ok()) {
    (void)Done(launched.epoch, nullptr, launched.sequence, launched.submitted, BucketNumbers{},
               /*measured=*/false);
  }
}

bool Cluster::LaunchLocked(const std::shared_ptr<Job>& job, ReduceOperation* operation,
                           const Entry& entry, Launched* launched) {
  const Links links = LinksOfLocked(entry);
  const std::shared_ptr<Epoch> epoch = EpochForLocked(links, &launched->told);
  if (epoch == nullptr) return false;
  const std::uint64_t number = launched->epoch = epoch->number;
  const std::uint64_t sequence = launched->sequence = ++epoch->sequence;
  InFlight& flight = epoch->in_flight[sequence];
  flight.operation = operation;
  flight.job = job;
  flight.start_ns = environment_.clock->NowNs();
  flight.waiting.insert(nullptr);
  NodeWork work;
  work.dtype = operation->dtype;
  work.count = operation->count;
  work.scale = operation->scale;
  work.measure = operation->measure;
  work.exact = operation->channel == 0;
  std::vector<v1::AttachResponse> messages(links.size());
  for (std::size_t i = 0; i < links.size(); ++i) {
    flight.waiting.insert(links[i].get());
    auto* launch = messages[i].mutable_launch();
    launch->set_epoch(number);
    launch->set_sequence(sequence);
    launch->set_dtype(static_cast<v1::DataType>(operation->dtype));
    launch->set_count(operation->count);
    launch->set_scale(operation->scale);
    launch->set_channel(operation->channel);
    launch->set_bucket(operation->bucket);
    launch->set_number(operation->number);
  }
  for (std::size_t i = 0; i < operation->ranks.size(); ++i) {
    const bool root = operation->root == static_cast<int>(operation->ranks[i]);
    const auto seat = entry.seats.find(operation->ranks[i]);
    if (operation->buffers[i] != nullptr) {
      // A root comes first on its node.
      work.buffers.insert(root ? work.buffers.begin() : work.buffers.end(), operation->buffers[i]);
      if (root) work.root_node = 0;
      continue;
    }
    const auto node = std::find(links.begin(), links.end(), seat->second.link) - links.begin();
    auto* incarnations =
        messages[static_cast<std::size_t>(node)].mutable_launch()->mutable_incarnations();
    incarnations->Add(seat->second.incarnation);
    if (!root) continue;
    work.root_node = static_cast<int>(node) + 1;
    incarnations->SwapElements(0, incarnations->size() - 1);
  }
  for (std::size_t i = 0; i < links.size(); ++i) {
    if (work.root_node >= 0) {
      messages[i].mutable_launch()->set_root_node(static_cast<std::uint32_t>(work.root_node));
    }
    links[i]->Queue(std::move(messages[i]));
    launched->told.push_back(links[i]);
  }
  work.done = [self = shared_from_this(), number, sequence, measured = !work.buffers.empty()](
                  const absl::Status& status, const BucketNumbers& numbers) {
    (void)self->Done(number, nullptr, sequence, status, numbers, measured);
  };
  launched->submitted = epoch->exchange->Submit(std::move(work));
  return true;
}

bool Cluster::TakesPart(const Epoch& epoch, const NodeLink* link) {
  return std::any_of(epoch.links.begin(), epoch.links.end(),
                     [link](const auto& other) { return other.get() == link; });
}

absl::Status Cluster::CheckNodeOf(const Epoch& epoch, const NodeLink* link,
                                  absl::string_view what) const {
  if (link == nullptr || TakesPart(epoch, link)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "MALFORMED",
      absl::StrCat("node ", link->node_name(), " sent ", what, " for epoch ", epoch.number,
                   " of job '", key_.job_id, "', whose engine it is no part of"),
      {{"job", key_.job_id}, {"node", link->node_name()}});
}

absl::Status Cluster::LaunchDone(NodeLink* link, const v1::LaunchDone& message) {
  absl::Status status;
  if (message.status().code() != 0) status = StatusFromPeer(message.status());
  if (message.sequence() == 0 && !status.ok()) return Suspect(message.epoch(), link, status);
  return Done(message.epoch(), link, message.sequence(), status,
              {message.sum_of_squares(), message.non_finite()},
              // A node without ranks in it has seen nothing.
              /*measured=*/message.sum_of_squares() != 0 || message.non_finite() != 0);
}

absl::Status Cluster::Done(std::uint64_t number, NodeLink* link, std::uint64_t sequence,
                           const absl::Status& status, const BucketNumbers& numbers,
                           bool measured) {
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Epoch> epoch = FindLocked(number);
    if (epoch == nullptr) return absl::OkStatus();  // of nodes that meet no more
    const absl::Status takes_part = CheckNodeOf(*epoch, link, "LaunchDone");
    if (!takes_part.ok()) return takes_part;
  }
  if (!status.ok()) Fail(number, status);
  InFlight finished;
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Epoch> epoch = FindLocked(number);
    if (epoch == nullptr) return absl::OkStatus();
    const auto found = epoch->in_flight.find(sequence);
    if (found == epoch->in_flight.end() || found->second.waiting.erase(link) == 0) {
      // After Lost(), this node's word may still be on its way.
      if (link == nullptr || !epoch->failure.ok()) return absl::OkStatus();
      return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED",
                       absl::StrCat("node ", link->node_name(), " ended launch ", sequence,
                                    ", which it was not given or has ended"));
    }
    InFlight& flight = found->second;
    if (!status.ok() && flight.failure.ok()) flight.failure = status;
    // This node's, or of the first that has ranks in it: the result is the same everywhere.
    if (measured && (link == nullptr || !flight.has_numbers)) {
      flight.numbers = numbers;
      flight.has_numbers = true;
    }
    if (!flight.waiting.empty()) return absl::OkStatus();
    if (flight.failure.ok()) flight.failure = epoch->failure;
    finished = std::move(flight);
    epoch->in_flight.erase(found);
    ReapLocked();
  }
  Release();
  ReduceOperation* const operation = finished.operation;
  if (!finished.failure.ok()) operation->failure = EngineFailure(key_.job_id, finished.failure);
  operation->numbers = finished.numbers;
  operation->done({finished.start_ns, environment_.clock->NowNs()});
  return absl::OkStatus();
}

absl::Status Cluster::Suspect(std::uint64_t number, const NodeLink* link, const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    const std::shared_ptr<Epoch> epoch = FindLocked(number);
    if (epoch == nullptr) return absl::OkStatus();  // of nodes that meet no more
    const absl::Status takes_part = CheckNodeOf(*epoch, link, "LaunchDone");
    if (!takes_part.ok()) return takes_part;
    if (epoch->in_flight.empty()) {
      if (!epoch->suspicion.ok()) return absl::OkStatus();
      epoch->suspicion = why;
      epoch->suspected_ns = environment_.clock->NowNs();
      return absl::OkStatus();
    }
  }
  Fail(number, why);
  return absl::OkStatus();
}

void Cluster::Fail(std::uint64_t number, const absl::Status& why) {
  std::shared_ptr<Epoch> epoch;
  std::set<std::shared_ptr<Job>> jobs;
  {
    MutexLock lock(&mutex_);
    epoch = FindLocked(number);
    if (epoch == nullptr || !epoch->failure.ok()) return;
    epoch->failure = why;
    ++epoch->users;
    for (const auto& [sequence, flight] : epoch->in_flight) jobs.insert(flight.job);
    for (auto& [raw, entry] : jobs_) {
      auto job = entry.job.lock();
      if (job == nullptr || (jobs.count(job) == 0 && LinksOfLocked(entry) != epoch->links))
        continue;
      // From now on: what it launched before it is ended would make the nodes meet once more.
      entry.failing = true;
      jobs.insert(std::move(job));
    }
  }
  Log(LogLevel::kWarning, "engine failed",
      {{"job", key_.job_id}, {"epoch", number}, {"why", why.message()}});
  for (const auto& job : jobs) job->End(EngineFailure(key_.job_id, why));
  epoch->exchange->Abort(why);
  Links told;
  {
    MutexLock lock(&mutex_);
    --epoch->users;
    if (current_ == epoch) RetireLocked(epoch, &told);
    ReapLocked();
  }
  for (const auto& link : told) link->Flush();
}

void Cluster::Detach(const std::shared_ptr<NodeLink>& link) {
  {
    MutexLock lock(&mutex_);
    detaching_.push_back(link);
  }
  Release();
}

void Cluster::Release() {
  Links told, released;
  std::vector<Held> held;
  {
    MutexLock lock(&mutex_);
    if (!detaching_.empty() && current_ != nullptr && !current_->in_flight.empty()) return;
    held.swap(held_);
    released.swap(detaching_);
    bool takes_part = false;
    for (const auto& link : released) {
      ForgetLocked(link.get());
      takes_part = takes_part || (current_ != nullptr && TakesPart(*current_, link.get()));
    }
    if (takes_part) RetireLocked(current_, &told);
  }
  for (const auto& link : told) link->Flush();
  for (const auto& link : released) link->Close(absl::OkStatus());
  for (const Held& launch : held) Launch(launch.job.get(), launch.operation);
}

void Cluster::ForgetLocked(const NodeLink* link) {
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    auto& seats = it->second.seats;
    for (auto seat = seats.begin(); seat != seats.end();) {
      seat = seat->second.link.get() == link ? seats.erase(seat) : std::next(seat);
    }
    it = seats.empty() ? jobs_.erase(it) : std::next(it);
  }
}

void Cluster::Lost(NodeLink* link, const absl::Status& why) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> owed;  // epoch, sequence
  std::vector<std::uint64_t> broken;
  {
    MutexLock lock(&mutex_);
    // A job none of whose ranks was lost with it, since they had all left, goes on without it.
    ForgetLocked(link);
    const auto is_it = [link](const auto& other) { return other.get() == link; };
    detaching_.erase(std::remove_if(detaching_.begin(), detaching_.end(), is_it), detaching_.end());
    std::vector<std::shared_ptr<Epoch>> epochs = retired_;
    if (current_ != nullptr) epochs.push_back(current_);
    for (const auto& epoch : epochs) {
      if (!TakesPart(*epoch, link)) continue;
      broken.push_back(epoch->number);
      for (const auto& [sequence, flight] : epoch->in_flight) {
        if (flight.waiting.count(link) > 0) owed.emplace_back(epoch->number, sequence);
      }
    }
  }
  for (const std::uint64_t epoch : broken) Fail(epoch, why);
  for (const auto& [epoch, sequence] : owed) {
    (void)Done(epoch, link, sequence, why, BucketNumbers{}, /*measured=*/false);
  }
  Release();
}

absl::StatusOr<std::shared_ptr<Rendezvous>> Cluster::StoreOf(std::uint64_t number,
                                                             const NodeLink* link) {
  MutexLock lock(&mutex_);
  if (current_ == nullptr || current_->number != number) return nullptr;
  const absl::Status takes_part = CheckNodeOf(*current_, link, "a rendezvous");
  if (!takes_part.ok()) return takes_part;
  return current_->store;
}

absl::Status Cluster::RendezvousSet(NodeLink* link, const v1::RendezvousSet& message) {
  const auto store = StoreOf(message.epoch(), link);
  if (!store.ok() || *store == nullptr) return store.status();
  return (*store)->Put(message.key(), message.value());
}

absl::Status Cluster::RendezvousGet(const std::shared_ptr<NodeLink>& link,
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

void Cluster::Tick() {
  const std::vector<std::shared_ptr<Job>> jobs = Jobs();
  std::set<const Job*> over, formed;
  for (const auto& job : jobs) {
    if (job->Over()) {
      over.insert(job.get());
    } else if (job->Formed() && !job->Failed()) {
      formed.insert(job.get());
    }
  }
  std::uint64_t failed = 0;
  absl::Status why;
  Links told;
  {
    MutexLock lock(&mutex_);
    if (current_ != nullptr && !current_->suspicion.ok() &&
        environment_.clock->NowNs() >= current_->suspected_ns + kStreamEndPatienceNs) {
      failed = current_->number;
      why = current_->suspicion;
    }
    for (auto it = jobs_.begin(); it != jobs_.end();) {
      const auto& [job, entry] = *it;
      if (formed.count(job) > 0 && !entry.failing) EpochForLocked(LinksOfLocked(entry), &told);
      it = over.count(job) > 0 || entry.job.expired() ? jobs_.erase(it) : std::next(it);
    }
  }
  for (const auto& link : told) link->Flush();
  if (failed != 0) Fail(failed, why);
}

void Cluster::Shutdown() {
  Links told;
  {
    MutexLock lock(&mutex_);
    shut_down_ = true;
    if (current_ != nullptr) RetireLocked(current_, &told);
  }
  for (const auto& link : told) link->Flush();
}

bool Cluster::Idle() {
  MutexLock lock(&mutex_);
  return jobs_.empty();
}

std::uint64_t Cluster::epochs() {
  MutexLock lock(&mutex_);
  return last_epoch_;
}

JobNodes Cluster::NodesOf(const Job& job) {
  MutexLock lock(&mutex_);
  JobNodes nodes;
  const auto found = jobs_.find(&job);
  if (found == jobs_.end()) return nodes;
  const std::vector<std::shared_ptr<NodeLink>> links = LinksOfLocked(found->second);
  for (const auto& link : links) {
    NodeSnapshot& node = nodes.others.emplace_back();
    node.name = link->node_name();
    node.address = link->address();
    node.heard_ns = link->heard_ns();
    for (const auto& [rank, seat] : found->second.seats) {
      if (seat.link == link) node.ranks.push_back(rank);
    }
  }
  if (current_ != nullptr && current_->links == links) {
    nodes.engine = EngineSnapshot{current_->number, current_->node_names, environment_.engine,
                                  current_->exchange->Statistics()};
  }
  return nodes;
}

std::vector<std::shared_ptr<Job>> Cluster::Jobs() {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Job>> jobs;
  for (const auto& [raw, entry] : jobs_) {
    if (auto job = entry.job.lock()) jobs.push_back(std::move(job));
  }
  return jobs;
}

}  // namespace gradsync
