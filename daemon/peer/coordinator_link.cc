#include "daemon/peer/coordinator_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/peer/attached_node.h"
#include "daemon/peer/rank_messages.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kUnusedNs = 5'000'000'000;
// So long between two ticks: this daemon was stopped itself, and has not read what was said to it.
constexpr std::uint64_t kOwnStopNs = 1'000'000'000;

absl::Status FromGrpc(const grpc::Status& status) {
  google::rpc::Status proto;
  if (proto.ParseFromString(status.error_details()) && proto.code() == status.error_code()) {
    return FromProto(proto);
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// Out of their bounds, the engine refuses them, and the coordinator hears of it.
EngineSettings SettingsOf(const v1::ConnectEngine& connect) {
  constexpr std::uint64_t kMaxNumber = std::uint64_t{1} << 30;
  EngineSettings settings;
  settings.lanes = static_cast<int>(std::min<std::uint64_t>(connect.lanes(), kMaxNumber));
  settings.chunk_bytes = connect.chunk_bytes();
  settings.wire = static_cast<WireType>(
      std::min(static_cast<std::uint32_t>(connect.wire_type()), std::uint32_t{UINT8_MAX}));
  settings.silence_limit = absl::Milliseconds(
      static_cast<std::int64_t>(std::min<std::uint64_t>(connect.silence_limit_ms(), kMaxNumber)));
  return settings;
}

}  // namespace

CoordinatorLink::CoordinatorLink(const LinkContext& context, std::string address, JobKey key)
    : context_(context),
      address_(std::move(address)),
      key_(std::move(key)),
      dialed_ns_(context.clock->NowNs()),
      heard_ns_(dialed_ns_) {}

void CoordinatorLink::Dial(const std::shared_ptr<grpc::Channel>& channel,
                           grpc::CompletionQueue* queue) {
  v1::AttachRequest message;
  auto* hello = message.mutable_hello();
  hello->set_protocol(kPeerProtocol);
  hello->set_instance(context_.instance);
  hello->set_node_name(context_.node_name);
  hello->set_uid(key_.uid);
  hello->set_job_id(key_.job_id);
  hello->set_token_hash(key_.token_hash);
  hello->set_staging_bytes(context_.staging_bytes);
  Queue(std::move(message));
  const std::weak_ptr<CoordinatorLink> weak = Self();
  LentWorkers::Owner owner;
  owner.send = [weak](v1::AttachRequest message) {
    if (const auto link = weak.lock()) link->Send(std::move(message));
  };
  owner.find = [weak](std::uint64_t arena, std::uint32_t bucket,
                      std::uint64_t step) -> absl::StatusOr<LentBucket> {
    const auto link = weak.lock();
    if (link == nullptr) return absl::CancelledError("the coordinator is lost");
    return link->FindBucket(arena, bucket, step);
  };
  owner.settled = [weak] {
    if (const auto link = weak.lock()) link->MaybeEndRanks();
  };
  workers_ = std::make_shared<LentWorkers>(std::move(owner));
  stub_ = v1::Peer::NewStub(channel);
  call_.set_wait_for_ready(true);
  starting_ = Self();
  stream_ = stub_->PrepareAsyncAttach(&call_, queue);
  stream_->StartCall(&on_started_);
}

void CoordinatorLink::OnStarted(bool ok) {
  const auto keep = std::move(starting_);
  if (ok) {
    Began();
  } else {
    BeganBroken();
  }
}

bool CoordinatorLink::Join(const JoinRequest& request, const std::shared_ptr<SessionSink>& sink,
                           const std::function<void(absl::StatusOr<Joined>)>& joined) {
  State state;
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    state = state_;
    if (state == State::kDialing) waiting_.push_back({request, sink, joined});
    if (state == State::kUp) refused = detaching_;
    if (state == State::kUp && refused.ok()) ++joining_;
  }
  if (state == State::kDown) return false;
  if (!refused.ok()) {
    joined(refused);
    return true;
  }
  if (state == State::kSelf) context_.here->Join(request, sink, joined);
  if (state == State::kUp) StartRank({request, sink, joined});
  return true;
}

void CoordinatorLink::StartRank(Waiting waiting) {
  RemoteRank::Context context;
  context.send = [weak = std::weak_ptr<CoordinatorLink>(Self())](v1::AttachRequest message) {
    if (const auto link = weak.lock()) link->Send(std::move(message));
  };
  context.executor = context_.executor;
  context.clock = context_.clock;
  context.max_buckets = context_.max_buckets;
  context.coordinator = address_;
  context.workers = workers_;
  auto rank = std::make_shared<RemoteRank>(waiting.request, std::move(context),
                                           std::move(waiting.sink), std::move(waiting.joined));
  bool down = false;
  {
    MutexLock lock(&mutex_);
    ranks_[rank->incarnation()] = rank;
    --joining_;
    down = state_ == State::kDown;
  }
  if (down) return MaybeEndRanks();
  rank->SendOpen();
}

void CoordinatorLink::OnMessage(const v1::AttachResponse& message) {
  heard_ns_.store(context_.clock->NowNs());
  switch (message.kind_case()) {
    case v1::AttachResponse::kWelcome:
      return OnWelcome(message.welcome());
    case v1::AttachResponse::kRankResponse:
      return OnRankResponse(message.rank_response());
    case v1::AttachResponse::kConnectEngine:
      return OnConnectEngine(message.connect_engine());
    case v1::AttachResponse::kLaunch:
      return OnLaunch(message.launch());
    case v1::AttachResponse::kEngineEnd: {
      {
        MutexLock lock(&mutex_);
        if (epoch_ == nullptr || epoch_->number != message.engine_end().epoch()) return;
      }
      absl::Status why = StatusFromPeer(message.engine_end().status());
      return EndEpoch(why.ok() ? absl::CancelledError("the coordinator ended the engine") : why);
    }
    case v1::AttachResponse::kRendezvousValue: {
      std::shared_ptr<Rendezvous> store;
      {
        MutexLock lock(&mutex_);
        if (epoch_ == nullptr || epoch_->number != message.rendezvous_value().epoch()) return;
        store = epoch_->store;
      }
      (void)store->Put(message.rendezvous_value().key(), message.rendezvous_value().value());
      return;
    }
    case v1::AttachResponse::kWorkerCall: {
      {
        MutexLock lock(&mutex_);
        idle_since_ns_ = context_.clock->NowNs();  // as OnLaunch
      }
      return workers_->Call(message.worker_call());
    }
    case v1::AttachResponse::kWorkerRelease:
      return workers_->Release(message.worker_release());
    case v1::AttachResponse::kPing: {
      v1::AttachRequest pong;
      pong.mutable_pong()->set_number(message.ping().number());
      return Send(std::move(pong));
    }
    case v1::AttachResponse::KIND_NOT_SET:
      return;
  }
}

void CoordinatorLink::OnWelcome(const v1::Welcome& welcome) {
  std::vector<Waiting> waiting;
  const bool self = welcome.instance() == context_.instance;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDialing) return;
    state_ = self ? State::kSelf : State::kUp;
    coordinator_ = welcome.node_name();
    idle_since_ns_ = context_.clock->NowNs();
    waiting.swap(waiting_);
    if (!self) joining_ += waiting.size();
  }
  if (!self) {
    LogLimited(LogLevel::kInfo, "attached to coordinator",
               {{"job", key_.job_id}, {"node", welcome.node_name()}, {"address", address_}});
  }
  for (Waiting& one : waiting) {
    if (self) {
      context_.here->Join(one.request, one.sink, one.joined);
    } else {
      StartRank(std::move(one));
    }
  }
  if (self) Cancel();
}

void CoordinatorLink::OnRankResponse(const v1::RankResponse& response) {
  std::shared_ptr<RemoteRank> rank;
  {
    MutexLock lock(&mutex_);
    const auto found = ranks_.find(response.incarnation());
    if (found == ranks_.end()) return;
    rank = found->second;
  }
  if (!rank->Take(response.response())) return;
  MutexLock lock(&mutex_);
  ranks_.erase(response.incarnation());
  if (ranks_.empty()) idle_since_ns_ = context_.clock->NowNs();
}

// ---- The engine
// ----------------------------------------------------------------------------------

void CoordinatorLink::OnConnectEngine(const v1::ConnectEngine& connect) {
  EndEpoch(absl::CancelledError("the nodes meet again"));
  auto epoch = std::make_shared<Epoch>();
  epoch->number = connect.epoch();
  epoch->nodes = static_cast<std::uint32_t>(connect.node_names_size());
  const std::weak_ptr<CoordinatorLink> weak = Self();
  epoch->store = std::make_shared<Rendezvous>(
      [weak, number = epoch->number](const std::string& key, const std::string& value) {
        v1::AttachRequest message;
        message.mutable_rendezvous_set()->set_epoch(number);
        message.mutable_rendezvous_set()->set_key(key);
        message.mutable_rendezvous_set()->set_value(value);
        if (const auto link = weak.lock()) link->Send(std::move(message));
      },
      [weak, number = epoch->number](const std::string& key) {
        v1::AttachRequest message;
        message.mutable_rendezvous_get()->set_epoch(number);
        message.mutable_rendezvous_get()->set_key(key);
        if (const auto link = weak.lock()) link->Send(std::move(message));
      });
  EngineSpec spec;
  spec.node = connect.node();
  spec.node_names.assign(connect.node_names().begin(), connect.node_names().end());
  spec.address = context_.address.empty() ? connect.address() : context_.address;
  spec.settings = SettingsOf(connect);
  epoch->node_names = spec.node_names;
  epoch->settings = spec.settings;
  spec.failed = [weak, number = epoch->number](const absl::Status& why) {
    // Told as the end of a launch that there never was.
    v1::AttachRequest message;
    message.mutable_launch_done()->set_epoch(number);
    *message.mutable_launch_done()->mutable_status() = ToProto(why);
    if (const auto link = weak.lock()) link->Send(std::move(message));
  };
  epoch->exchange = std::make_unique<NodeExchange>(
      [make = context_.make_engine, spec, store = epoch->store]() mutable {
        spec.store = store.get();
        return make(spec);
      },
      spec.failed);
  epochs_.fetch_add(1);
  MutexLock lock(&mutex_);
  epoch_ = std::move(epoch);
}

void CoordinatorLink::EndEpoch(const absl::Status& why) {
  std::shared_ptr<Epoch> epoch;
  {
    MutexLock lock(&mutex_);
    epoch = std::move(epoch_);
    epoch_ = nullptr;
  }
  if (epoch == nullptr) return;
  epoch->store->Cancel(why);
  epoch->exchange->Abort(why);
  // There, not where the last reference goes: that may be one of the engine's own threads.
  context_.reaper->Run([epoch = std::move(epoch)] { epoch->exchange.reset(); });
}

void CoordinatorLink::OnLaunch(const v1::Launch& launch) {
  std::shared_ptr<Epoch> epoch;
  std::vector<std::shared_ptr<RemoteRank>> ranks;
  absl::Status status;
  {
    MutexLock lock(&mutex_);
    ++in_flight_;
    // A node takes part also when its ranks have all exited.
    idle_since_ns_ = context_.clock->NowNs();
    epoch = epoch_;
    if (epoch == nullptr || epoch->number != launch.epoch()) {
      epoch = nullptr;
      status = absl::InternalError("the coordinator launched on an engine that is not here");
    } else if (launch.sequence() != ++epoch->sequence) {
      status = absl::InternalError("the coordinator's launches are out of order");
    }
    for (const std::uint64_t incarnation : launch.incarnations()) {
      const auto found = ranks_.find(incarnation);
      if (found != ranks_.end()) {
        ranks.push_back(found->second);
      } else {
        status = absl::InternalError("the coordinator launched on a rank that is not here");
      }
    }
  }
  NodeWork work;
  work.dtype = static_cast<DataType>(launch.dtype());
  work.count = launch.count();
  work.scale = launch.scale();
  work.measure = launch.channel() != 0;
  work.exact = launch.channel() == 0;
  if (launch.has_root_node()) work.root_node = static_cast<int>(launch.root_node());
  if (launch.has_root_node() ? epoch != nullptr && (launch.root_node() >= epoch->nodes ||
                                                    launch.count() > context_.staging_bytes)
                             : ItemSize(work.dtype) == 0) {
    status = absl::InternalError("the coordinator launched on elements of no type, or too many");
  }
  std::vector<std::shared_ptr<SemaphorePage>> semaphores;
  for (const auto& rank : ranks) {
    auto memory = rank->MemoryOf(launch);
    if (!memory.ok()) {
      status = memory.status();
      break;
    }
    work.buffers.push_back(memory->data);
    work.keep.push_back(std::move(memory->keep));
    if (memory->semaphores != nullptr) semaphores.push_back(std::move(memory->semaphores));
  }
  v1::Launch brief;
  brief.set_epoch(launch.epoch());
  brief.set_sequence(launch.sequence());
  work.done = [self = Self(), brief, semaphores = std::move(semaphores), bucket = launch.bucket(),
               step = launch.number()](const absl::Status& done, const BucketNumbers& numbers) {
    for (const auto& page : semaphores) {
      if (done.ok()) page->SignalDone(bucket, step);
    }
    self->LaunchDone(brief, done, numbers);
  };
  // Always answered: the coordinator waits for it.
  if (status.ok()) status = epoch->exchange->Submit(std::move(work));
  if (!status.ok()) LaunchDone(brief, status, BucketNumbers{});
}

void CoordinatorLink::LaunchDone(const v1::Launch& launch, const absl::Status& status,
                                 const BucketNumbers& numbers) {
  v1::AttachRequest message;
  auto* done = message.mutable_launch_done();
  done->set_epoch(launch.epoch());
  done->set_sequence(launch.sequence());
  if (!status.ok()) *done->mutable_status() = ToProto(status);
  done->set_sum_of_squares(numbers.sum_of_squares);
  done->set_non_finite(numbers.non_finite);
  Send(std::move(message));
  {
    MutexLock lock(&mutex_);
    --in_flight_;
  }
  MaybeEndRanks();
}

absl::StatusOr<LentBucket> CoordinatorLink::FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                                       std::uint64_t step) {
  MutexLock lock(&mutex_);
  for (const auto& [incarnation, rank] : ranks_) {
    auto found = rank->BucketOf(arena, bucket, step);
    if (!absl::IsNotFound(found.status())) return found;
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "MALFORMED",
                   absl::StrCat("the coordinator launched on arena ", arena,
                                ", which no rank of its job has on node ", context_.node_name));
}

// ---- The end
// -------------------------------------------------------------------------------------

void CoordinatorLink::OnEnd() {
  bool silent = false;
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kDialing || state_ == State::kSelf) return;  // OnFinished knows why
    silent = silent_;
  }
  GoDown(silent ? "it said nothing for 5 s: its daemon is stopped, or the link is down"
                : "the connection to it has ended",
         Unless::kNever);
  // Here alone, where no message is being taken any more.
  const absl::Status lost = MakeError(absl::StatusCode::kUnavailable, "COORDINATOR_LOST",
                                      absl::StrCat("the coordinator at ", address_, " is lost"));
  {
    MutexLock lock(&mutex_);
    untold_ = Self();
  }
  EndEpoch(lost);
  workers_->End(lost);
  MaybeEndRanks();
}

void CoordinatorLink::OnFinished() {
  const absl::Status finish = FromGrpc(finish_);
  std::vector<Waiting> waiting;
  bool dialing = false, overdue = false;
  {
    MutexLock lock(&mutex_);
    dialing = state_ == State::kDialing;
    if (dialing) state_ = State::kDown;
    overdue = overdue_;
    waiting.swap(waiting_);
  }
  if (!dialing) {
    // Its ranks have been told that it is lost; this is why it hung up, where it said so.
    if (finish.ok() || absl::IsCancelled(finish)) return;
    LogLimited(LogLevel::kWarning, "the coordinator's last word",
               {{"job", key_.job_id}, {"address", address_}, {"why", finish.message()}});
    return;
  }
  absl::Status why = finish;
  if (overdue || DetailsOf(finish).reason.empty()) {
    why = MakeError(
        absl::StatusCode::kUnavailable, "COORDINATOR_UNREACHABLE",
        absl::StrCat(
            "the daemon at ", address_, ", which coordinates job '", key_.job_id,
            "', could not be reached from node ", context_.node_name,
            finish.message().empty() || overdue ? "" : absl::StrCat(": ", finish.message()),
            ". Check that gradsyncd runs there with peer_listen, that coordinator or "
            "MASTER_ADDR names that node, that its port is open between the nodes, and "
            "that both have peer_tls_* or neither."),
        {{"job", key_.job_id}, {"address", address_}});
  }
  for (const Waiting& one : waiting) one.joined(why);
}

bool CoordinatorLink::GoDown(const std::string& how, Unless unless) {
  bool needed = false;
  {
    MutexLock lock(&mutex_);
    needed = !ranks_.empty() || joining_ > 0;
    if (state_ == State::kDown || (needed && unless == Unless::kNeeded)) return false;
    state_ = State::kDown;
    how_down_ = how;
  }
  LogLimited(needed ? LogLevel::kWarning : LogLevel::kInfo,
             needed ? "coordinator lost" : "detached from coordinator",
             {{"job", key_.job_id}, {"address", address_}, {"why", how}});
  return true;
}

void CoordinatorLink::MaybeEndRanks() {
  std::map<std::uint64_t, std::shared_ptr<RemoteRank>> ranks;
  std::string who, how;
  std::shared_ptr<CoordinatorLink> keep;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDown || in_flight_ > 0 || workers_->busy()) return;
    keep.swap(untold_);
    ranks.swap(ranks_);
    who = absl::StrCat("the daemon that coordinates job '", key_.job_id, "', on node ",
                       coordinator_, " at ", address_, ", is lost; known because ", how_down_);
  }
  for (const auto& [incarnation, rank] : ranks) {
    if (rank->InDoubt()) {
      rank->End(MakeError(
          absl::StatusCode::kAborted, "STEP_IN_DOUBT",
          absl::StrCat(who, ". Rank ", rank->rank(),
                       " had every bucket of its step ready, and the verdict is not known: compare "
                       "the ranks' last steps, or heal them by a broadcast."),
          {{"job", key_.job_id}, {"rank", absl::StrCat(rank->rank())}, {"address", address_}}));
    } else {
      rank->End(MakeError(
          absl::StatusCode::kUnavailable, "COORDINATOR_LOST",
          absl::StrCat(who, ". Start it again and join again from every rank."),
          {{"job", key_.job_id}, {"rank", absl::StrCat(rank->rank())}, {"address", address_}}));
    }
  }
}

bool CoordinatorLink::Drop(const std::string& why) {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kUp) return false;
  }
  if (!GoDown(why, Unless::kNeeded)) return false;
  Cancel();
  return true;
}

void CoordinatorLink::Tick(std::uint64_t now_ns) {
  bool cancel = false, idle = false, up = false;
  {
    MutexLock lock(&mutex_);
    if (ticked_ns_ != 0 && now_ns > ticked_ns_ + kOwnStopNs) heard_ns_.store(now_ns);
    ticked_ns_ = now_ns;
    up = state_ == State::kUp;
    if (state_ == State::kDialing && now_ns > dialed_ns_ + context_.reach_patience_ns) {
      overdue_ = cancel = true;
    } else if (state_ == State::kUp && now_ns > heard_ns_.load() + kPeerSilenceNs + kPingPeriodNs) {
      silent_ = cancel = true;
    } else if (state_ == State::kUp) {
      // Nothing is kept by one whose job has never formed.
      const std::uint64_t idle_ns = epochs_.load() == 0 ? kUnusedNs : context_.idle_ns;
      idle = now_ns > idle_since_ns_ + idle_ns;
    }
  }
  if (idle) Drop("nothing has needed it for a while");
  if (up) workers_->Tick();
  if (cancel) Cancel();
}

void CoordinatorLink::EndRanks(const absl::Status& why) {
  std::vector<std::shared_ptr<RemoteRank>> ranks;
  std::vector<Waiting> waiting;
  bool dialing = false;
  {
    MutexLock lock(&mutex_);
    for (const auto& [incarnation, rank] : ranks_) ranks.push_back(rank);
    waiting.swap(waiting_);
    dialing = state_ == State::kDialing;
  }
  for (const Waiting& one : waiting) one.joined(why);
  if (dialing) Cancel();
  for (const auto& rank : ranks) rank->WillBeLost(why);
  for (const auto& rank : ranks) rank->Lose(rank->rank(), rank->incarnation(), why);
}

bool CoordinatorLink::EndIdle(const absl::Status& why) {
  bool up = false, detach = false;
  {
    MutexLock lock(&mutex_);
    const auto in_step = [](const auto& entry) { return entry.second->InStep(); };
    if (std::any_of(ranks_.begin(), ranks_.end(), in_step)) return false;
    up = state_ == State::kUp;
    if (up && !detaching_.ok()) return false;
    detach = up && ranks_.empty() && joining_ == 0;
    if (detach) detaching_ = why;
  }
  if (detach) {
    v1::AttachRequest message;
    message.mutable_detach();
    Send(std::move(message));
  } else {
    // They are forgotten once the coordinator has answered.
    EndRanks(why);
  }
  return !up;
}

std::optional<RemoteJobSnapshot> CoordinatorLink::Snapshot() {
  MutexLock lock(&mutex_);
  const bool dialing = state_ == State::kDialing && !waiting_.empty();
  if (!dialing && (state_ != State::kUp || ranks_.empty())) return std::nullopt;
  RemoteJobSnapshot job;
  job.uid = key_.uid;
  job.job_id = key_.job_id;
  job.coordinator = address_;
  job.node_name = coordinator_;
  job.connected = !dialing;
  job.heard_ns = heard_ns_.load();
  for (const auto& [incarnation, rank] : ranks_) job.incarnations.insert(incarnation);
  if (epoch_ != nullptr) {
    job.engine = EngineSnapshot{epoch_->number, epoch_->node_names, epoch_->settings,
                                epoch_->exchange->Statistics()};
  }
  return job;
}

bool CoordinatorLink::ended() {
  MutexLock lock(&mutex_);
  return state_ == State::kDown;
}

bool CoordinatorLink::is_self() {
  MutexLock lock(&mutex_);
  return state_ == State::kSelf;
}

}  // namespace gradsync
