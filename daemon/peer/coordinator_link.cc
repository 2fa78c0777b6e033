#include "daemon/peer/coordinator_link.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/local_caller.h"
#include "daemon/peer/node_name.h"
#include "daemon/peer/peer_status.h"
#include "daemon/peer/reach_probe.h"
#include "daemon/peer/socket_table.h"

namespace gradsync::daemon {
namespace {

// How long a link that never had an engine is kept without ranks.
constexpr std::uint64_t kUnusedNs = 5'000'000'000;
// After so long between two ticks this daemon itself was stopped, and has yet to read its messages.
constexpr std::uint64_t kOwnStopNs = 1'000'000'000;

// A coordinator that sends nothing for so long is lost. It pings once in kPingPeriodNs. If bytes
// wait in the socket, because gRPC's threads are busy, it has longer.
constexpr std::uint64_t kSilenceNs = kPeerSilenceNs + kPingPeriodNs;
constexpr std::uint64_t kUnreadNs = kUnreadSilenceNs + kPingPeriodNs;

// Until the Welcome an honest coordinator sends a few frames, and less than this is read of it in
// vain. Afterwards see kPeerVain.
constexpr std::uint64_t kMostVainUnwelcomed = 1 << 20;
constexpr char kHarm[] =
    "it sends too many bytes that are no message, or too many or too long headers, or it resets "
    "too many calls";

// A connection can be lost by chance before the Welcome: its coordinator starts again, or is so
// busy with others that it ends this one. So a rank has a few.
constexpr std::uint32_t kMostLost = 3;

constexpr char kAttach[] = "/gradsync.v1.Peer/Attach";
// What a light message may name: more than a node or a worker usually has ranks.
constexpr int kLightRanks = 64;
constexpr std::size_t kLightCallBytes = 256;

std::string WhySilent(std::uint64_t silent_ns) {
  return absl::StrCat("it sent nothing for ", silent_ns / 1'000'000'000,
                      " s: its daemon is stopped, or the link is down");
}

// `message`: null if it is not parsed. The light ones are those of a step or an operation.
MessageWeight WeightOf(const v1::AttachResponse* message) {
  bool light = false;
  switch (message == nullptr ? v1::AttachResponse::KIND_NOT_SET : message->kind_case()) {
    case v1::AttachResponse::kPing:
      return MessageWeight::kUrgent;
    case v1::AttachResponse::kLaunch:
      light = message->launch().incarnations_size() <= kLightRanks;
      break;
    case v1::AttachResponse::kWorkerCall:
      light = message->worker_call().call().size() <= kLightCallBytes;
      break;
    case v1::AttachResponse::kRankResponse:
      switch (message->rank_response().response().kind_case()) {
        case v1::SessionResponse::kBucketDone:
        case v1::SessionResponse::kStepDone:
        case v1::SessionResponse::kChunkReady:
        case v1::SessionResponse::kOperationDone:
          light = true;
          break;
        default:
          break;
      }
      break;
    default:
      break;
  }
  return light ? MessageWeight::kLight : MessageWeight::kHeavy;
}

// The coordinator has chosen the status, unless it is gRPC's own.
absl::Status FromGrpc(const grpc::Status& status) {
  google::rpc::Status proto;
  if (!proto.ParseFromString(status.error_details()) || proto.code() != status.error_code()) {
    proto.Clear();
    proto.set_code(status.error_code());
    proto.set_message(status.error_message());
  }
  return StatusFromPeer(proto);
}

}  // namespace

CoordinatorLink::CoordinatorLink(const LinkContext& context, std::string address, JobKey key)
    : MessageStream(kPeerUnread),
      context_(context),
      address_(std::move(address)),
      key_(std::move(key)),
      heard_ns_(context.clock->NowNs()) {}

std::shared_ptr<CoordinatorLink> CoordinatorLink::Create(const LinkContext& context,
                                                         std::string address, JobKey key) {
  auto created = std::make_shared<CoordinatorLink>(context, std::move(address), std::move(key));
  const std::weak_ptr<CoordinatorLink> weak = created;
  const auto send = [weak](v1::AttachRequest message) {
    if (const auto link = weak.lock()) link->Send(std::move(message));
  };
  const auto settled = [weak] {
    if (const auto link = weak.lock()) link->MaybeEndRanks();
  };
  AgentEngine::Context engine;
  engine.user = context.payer;
  engine.memory = context.memory;
  engine.node_name = context.node_name;
  engine.address = context.address;
  engine.staging_bytes = context.staging_bytes;
  engine.limits = context.engine_limits;
  engine.make_engine = context.make_engine;
  engine.encrypted = context.tls;
  engine.reaper = context.reaper;
  engine.send = send;
  engine.find_rank = [weak](std::uint64_t incarnation) -> std::shared_ptr<ForwardingJob> {
    const auto link = weak.lock();
    return link == nullptr ? nullptr : link->FindRank(incarnation);
  };
  engine.settled = settled;
  created->engine_ = std::make_shared<AgentEngine>(std::move(engine));
  WorkerProxyServer::Owner owner;
  owner.send = send;
  owner.find = [weak](std::uint64_t arena, std::uint32_t bucket,
                      std::uint64_t step) -> absl::StatusOr<ProxiedBucket> {
    const auto link = weak.lock();
    if (link == nullptr) return absl::CancelledError("the coordinator is lost");
    return link->FindBucket(arena, bucket, step);
  };
  owner.settled = settled;
  owner.account = {context.memory, context.payer};
  created->workers_ = std::make_shared<WorkerProxyServer>(std::move(owner));
  return created;
}

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
  hello->set_engine_lanes(static_cast<std::uint32_t>(context_.engine_limits.lanes));
  hello->set_engine_chunk_bytes(context_.engine_limits.chunk_bytes);
  Queue(std::move(message));
  {
    MutexLock lock(&mutex_);
    channel_ = channel;
    queue_ = queue;
  }
  call_.set_wait_for_ready(true);
  starting_ = Self();
  // The stub of v1::Peer would parse every message on the queue's threads.
  grpc::TemplatedGenericStub<v1::AttachRequest, LazyMessage<v1::AttachResponse>> stub(channel);
  stream_ = stub.PrepareCall(&call_, kAttach, queue);
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
    if (state == State::kDialing) {
      ranks_.Wait({request, sink, joined, context_.clock->NowNs() + request.patience_ns});
    }
    if (state == State::kUp) refused = detaching_;
    if (state == State::kUp && refused.ok()) ranks_.BeginJoin();
  }
  if (state == State::kEnded) return false;
  if (!refused.ok()) {
    joined(refused);
    return true;
  }
  if (state == State::kSelf) context_.here->Join(request, sink, joined);
  if (state == State::kUp) StartRank({request, sink, joined});
  return true;
}

void CoordinatorLink::StartRank(Waiting waiting) {
  ForwardingJob::Context context;
  context.send = [weak = std::weak_ptr<CoordinatorLink>(Self())](v1::AttachRequest message) {
    if (const auto link = weak.lock()) link->Send(std::move(message));
  };
  context.executor = context_.executor;
  context.max_buckets = context_.max_buckets;
  context.coordinator = address_;
  context.workers = workers_;
  auto rank = std::make_shared<ForwardingJob>(waiting.request, std::move(context),
                                              std::move(waiting.sink), std::move(waiting.joined));
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    ranks_.Add(rank);
    ended = state_ == State::kEnded;
  }
  if (ended) return MaybeEndRanks();
  rank->SendOpen();
}

void CoordinatorLink::InTurn(const LazyMessage<v1::AttachResponse>* message, UserTurns::Take take) {
  if (message != nullptr) context_.sockets->CountMessage(message->Bytes());
  if (turns_ == nullptr) turns_ = context_.turns->Of(context_.payer);
  const auto turns = turns_;  // this link may end within the call
  const std::uint64_t begin_ns = context_.clock->NowNs();
  const v1::AttachResponse* parsed = nullptr;
  if (message != nullptr) {
    parsed = turns->HasShare(begin_ns) ? message->IfShort() : message->IfParsed();
  }
  turns->Add(begin_ns, WeightOf(parsed), std::move(take));
}

void CoordinatorLink::OnMessage(const LazyMessage<v1::AttachResponse>& received) {
  heard_ns_.store(context_.clock->NowNs());
  if (const v1::AttachResponse* const message = received.Get()) return Take(*message);
  constexpr char kWhy[] =
      "it sent bytes that are no message, or a message that takes too much memory";
  EndForHarm(kWhy);
}

void CoordinatorLink::Take(const v1::AttachResponse& message) {
  if (!message.has_welcome() && !Welcomed()) {
    const auto* const kind = message.GetDescriptor()->FindFieldByNumber(message.kind_case());
    return Refuse(absl::StrCat("it sent '", kind == nullptr ? "nothing" : kind->name(),
                               "' before its Welcome"));
  }
  switch (message.kind_case()) {
    case v1::AttachResponse::kWelcome:
      return OnWelcome(message.welcome());
    case v1::AttachResponse::kRankResponse:
      return OnRankResponse(message.rank_response());
    case v1::AttachResponse::kConnectEngine:
      if (!context_.engine_rate->Take(payer(), context_.clock->NowNs())) {
        return EndForHarm("its user's coordinators connect engines too often");
      }
      return engine_->Connect(message.connect_engine());
    case v1::AttachResponse::kLaunch:
      NoteUse();
      return engine_->Launch(message.launch());
    case v1::AttachResponse::kEngineEnd:
      return engine_->Take(message.engine_end());
    case v1::AttachResponse::kRendezvousValue:
      return engine_->Take(message.rendezvous_value());
    case v1::AttachResponse::kWorkerCall:
      NoteUse();
      return workers_->Call(message.worker_call());
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

bool CoordinatorLink::Welcomed() {
  MutexLock lock(&mutex_);
  return welcomed_;
}

void CoordinatorLink::Refuse(const std::string& why) {
  std::vector<Waiting> waiting;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDialing) return;
    state_ = State::kEnded;
    waiting = ranks_.TakeWaiting();
  }
  Cancel();
  const absl::Status refused = Refused(why);
  for (const Waiting& one : waiting) one.joined(refused);
}

absl::Status CoordinatorLink::Refused(const std::string& why) const {
  LogLimited(LogLevel::kWarning, "coordinator refused",
             {{"job", key_.job_id}, {"uid", key_.uid}, {"address", address_}, {"why", why}});
  return MakeError(absl::StatusCode::kPermissionDenied, reason::kCoordinatorRefused,
                   absl::StrCat("node ", context_.node_name, " takes no orders from ", address_,
                                " as the coordinator of job '", key_.job_id, "': ", why),
                   {{field::kJob, key_.job_id}, {field::kAddress, address_}});
}

bool CoordinatorLink::EndIfHarmful(std::uint64_t vain, std::uint64_t most) {
  const std::uint64_t one = Welcomed() ? kPeerVain.one : kMostVainUnwelcomed;
  if (!context_.sockets->EndHarmful({one, most, kPeerVain.some}, vain)) return false;
  const std::string why = WhyHarmful();
  Refuse(why);
  Break(why);
  return true;
}

void CoordinatorLink::Break(const std::string& why) {
  {
    MutexLock lock(&mutex_);
    if (cause_.empty()) cause_ = why;
  }
  Cancel();
}

void CoordinatorLink::EndForHarm(const std::string& why) {
  {
    MutexLock lock(&mutex_);
    if (cause_.empty()) cause_ = why;  // before Tick() sees the harm
  }
  context_.sockets->NoteHarm();
  Refuse(why);
  Cancel();
}

std::string CoordinatorLink::WhyHarmful() {
  MutexLock lock(&mutex_);
  return cause_.empty() ? kHarm : cause_;
}

void CoordinatorLink::OnWelcome(const v1::Welcome& welcome) {
  if (Welcomed()) return;
  if (!IsNodeName(welcome.node_name())) {
    return Refuse("its node's name is empty, too long or not printable");
  }
  // Without TLS anyone can answer. On this machine the kernel knows who does.
  if (!context_.tls) {
    const std::string address = call_.peer();
    SocketTable table(context_.clock);  // of its own: a read takes time from its own user alone
    const std::string stranger = WhyStranger(
        address, [&] { return OwnEndsTo(address); }, CanFindOwners() ? nullptr : &table,
        context_.clock->NowNs());
    if (!stranger.empty()) {
      return Refuse(absl::StrCat("it is ", stranger, ", and the peer port has no TLS"));
    }
  }
  std::vector<Waiting> waiting;
  const bool self = welcome.instance() == context_.instance;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDialing) return;
    state_ = self ? State::kSelf : State::kUp;
    welcomed_ = true;
    coordinator_ = welcome.node_name();
    idle_since_ns_ = context_.clock->NowNs();
    waiting = ranks_.TakeWaiting();
    if (!self) ranks_.BeginJoin(waiting.size());
  }
  if (!self) {
    LogLimited(LogLevel::kInfo, "attached to coordinator",
               {{"job", key_.job_id},
                {"uid", key_.uid},
                {"node", welcome.node_name()},
                {"address", address_}});
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

void CoordinatorLink::NoteUse() {
  MutexLock lock(&mutex_);
  idle_since_ns_ = context_.clock->NowNs();
}

void CoordinatorLink::OnRankResponse(const v1::RankResponse& response) {
  const std::shared_ptr<ForwardingJob> rank = FindRank(response.incarnation());
  if (rank == nullptr) return;
  const absl::StatusOr<bool> last = rank->Take(response.response());
  if (!last.ok()) return Break(std::string(last.status().message()));
  if (!*last) return;
  MutexLock lock(&mutex_);
  ranks_.Remove(response.incarnation());
  if (ranks_.empty()) idle_since_ns_ = context_.clock->NowNs();
}

std::shared_ptr<ForwardingJob> CoordinatorLink::FindRank(std::uint64_t incarnation) {
  MutexLock lock(&mutex_);
  return ranks_.Find(incarnation);
}

absl::StatusOr<ProxiedBucket> CoordinatorLink::FindBucket(std::uint64_t arena, std::uint32_t bucket,
                                                          std::uint64_t step) {
  MutexLock lock(&mutex_);
  auto found = ranks_.FindBucket(arena, bucket, step);
  if (!absl::IsNotFound(found.status())) return found;
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kMalformed,
                   absl::StrCat("the coordinator launched on arena ", arena,
                                ", which no rank of its job has on node ", context_.node_name));
}

// ---- Its end ------------------------------------------------------------------------------------

void CoordinatorLink::OnEnd(const absl::Status&) {
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kDialing || state_ == State::kSelf) return;  // OnFinished() handles it
  }
  const std::string disconnected = WhyDisconnected();
  std::string cause = "the connection to it has ended";
  if (HasHarmed()) cause = kHarm;
  if (!disconnected.empty()) cause = absl::StrCat("it was disconnected: ", disconnected);
  MarkEnded(cause, Unless::kNever);
  // Not earlier: no more messages are handled from here on.
  const absl::Status lost = MakeError(absl::StatusCode::kUnavailable, reason::kCoordinatorLost,
                                      absl::StrCat("the coordinator at ", address_, " is lost"));
  {
    MutexLock lock(&mutex_);
    unended_ = Self();
  }
  engine_->End(lost);
  workers_->End(lost);
  MaybeEndRanks();
}

void CoordinatorLink::OnFinished() {
  const absl::Status finish = FromGrpc(finish_);
  std::vector<Waiting> waiting;
  bool dialing = false;
  {
    MutexLock lock(&mutex_);
    dialing = state_ == State::kDialing;
    if (dialing) state_ = State::kEnded;
    waiting = ranks_.TakeWaiting();
  }
  if (!dialing) {
    // The ranks already know that the coordinator is lost. This is the reason that it gave, if any.
    if (finish.ok() || absl::IsCancelled(finish)) return;
    LogLimited(LogLevel::kWarning, "the coordinator closed the stream",
               {{"job", key_.job_id},
                {"uid", key_.uid},
                {"address", address_},
                {"why", finish.message()}});
    return;
  }
  absl::Status why = finish;
  bool lost = false;
  if (HasHarmed()) {
    why = Refused(WhyHarmful());
  } else if (DetailsOf(finish).reason.empty()) {
    why = Unreachable(std::string(finish.message()));
    // So gRPC calls a connection that breaks.
    lost = absl::IsUnavailable(finish) || absl::IsCancelled(finish) || absl::IsInternal(finish) ||
           absl::IsUnknown(finish);
  }
  for (const Waiting& one : waiting) {
    if (!lost || !JoinAnew(one)) one.joined(why);
  }
}

bool CoordinatorLink::JoinAnew(const Waiting& waiting) {
  const std::uint64_t now_ns = context_.clock->NowNs();
  if (context_.anew == nullptr || waiting.request.connections_lost >= kMostLost ||
      now_ns >= waiting.deadline_ns) {
    return false;
  }
  JoinRequest request = waiting.request;
  request.patience_ns = waiting.deadline_ns - now_ns;
  ++request.connections_lost;
  context_.anew->Join(request, waiting.sink, waiting.joined);
  return true;
}

absl::Status CoordinatorLink::Unreachable(const std::string& why) const {
  return MakeError(
      absl::StatusCode::kUnavailable, reason::kCoordinatorUnreachable,
      absl::StrCat("node ", context_.node_name, " cannot reach the daemon at ", address_,
                   ", which coordinates job '", key_.job_id, "': ", ExplainUnreachable(why)),
      {{field::kJob, key_.job_id}, {field::kAddress, address_}});
}

void CoordinatorLink::OnProbed(const std::string& why) {
  std::vector<Waiting> overdue;
  bool last = false;
  {
    MutexLock lock(&mutex_);
    probing_ = false;
    // With a message the coordinator has answered after all.
    if (state_ != State::kDialing || HasMessage()) return;
    overdue = ranks_.TakeOverdue(context_.clock->NowNs());
    last = !ranks_.waiting();
    // A rank that comes now dials anew.
    if (last) state_ = State::kEnded;
  }
  const absl::Status unreachable = Unreachable(why);
  for (const Waiting& one : overdue) one.joined(unreachable);
  if (last) Cancel();
}

bool CoordinatorLink::MarkEnded(const std::string& cause, Unless unless) {
  bool needed = false;
  std::string first;
  {
    MutexLock lock(&mutex_);
    needed = !ranks_.unused();
    if (state_ == State::kEnded || (needed && unless == Unless::kNeeded)) return false;
    state_ = State::kEnded;
    if (cause_.empty()) cause_ = cause;
    first = cause_;
  }
  LogLimited(needed ? LogLevel::kWarning : LogLevel::kInfo,
             needed ? "coordinator lost" : "detached from coordinator",
             {{"job", key_.job_id}, {"uid", key_.uid}, {"address", address_}, {"why", first}});
  return true;
}

void CoordinatorLink::MaybeEndRanks() {
  ForwardedRanks::Ranks ranks;
  std::string who;
  std::shared_ptr<CoordinatorLink> keep;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kEnded || engine_->busy() || workers_->busy()) return;
    keep.swap(unended_);
    ranks = ranks_.TakeAll();
    who = absl::StrCat("the daemon that coordinates job '", key_.job_id, "', on node ",
                       coordinator_, " at ", address_, ", is lost; known because ", cause_);
  }
  for (const auto& rank : ranks) {
    if (rank->layouts().InDoubt()) {
      rank->End(MakeError(
          absl::StatusCode::kAborted, reason::kStepInDoubt,
          absl::StrCat(who, ". Rank ", rank->rank(),
                       " had every bucket of its step ready, and the verdict is not known: compare "
                       "the ranks' last steps, or go on from a checkpoint on every rank."),
          {{field::kJob, key_.job_id}, {field::kRank, rank->rank()}, {field::kAddress, address_}}));
    } else {
      rank->End(MakeError(
          absl::StatusCode::kUnavailable, reason::kCoordinatorLost,
          absl::StrCat(who, ". Start it again and join again from every rank."),
          {{field::kJob, key_.job_id}, {field::kRank, rank->rank()}, {field::kAddress, address_}}));
    }
  }
}

bool CoordinatorLink::Drop(const std::string& why) {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kUp) return false;
  }
  if (!MarkEnded(why, Unless::kNeeded)) return false;
  Cancel();
  return true;
}

void CoordinatorLink::EndAbandoned() {
  std::vector<Waiting> waiting;
  ForwardedRanks::Ranks forwarded;
  bool last = false;
  {
    MutexLock lock(&mutex_);
    waiting = ranks_.TakeAbandoned();
    forwarded = ranks_.All();
    last = state_ == State::kDialing && !waiting.empty() && !ranks_.waiting();
    // A rank that comes now dials anew.
    if (last) state_ = State::kEnded;
  }
  forwarded.erase(std::remove_if(forwarded.begin(), forwarded.end(),
                                 [](const auto& rank) { return !rank->IsAbandoned(); }),
                  forwarded.end());
  if (waiting.empty() && forwarded.empty()) return;
  const absl::Status why =
      MakeError(absl::StatusCode::kAborted, reason::kStreamEnded,
                absl::StrCat("its connection was closed before the coordinator at ", address_,
                             " had answered"),
                {{field::kJob, key_.job_id}, {field::kAddress, address_}});
  for (const Waiting& one : waiting) one.joined(why);
  for (const auto& rank : forwarded) rank->Lose(rank->session(), why);
  if (last) Cancel();
}

void CoordinatorLink::Tick(std::uint64_t now_ns) {
  EndAbandoned();
  bool cancel = false, idle = false, up = false, tell = false;
  std::shared_ptr<grpc::Channel> probed;
  grpc::CompletionQueue* queue = nullptr;
  std::shared_ptr<ForwardingJob> unended;
  // Asked first: when it has been handled, heard_ns_ says so.
  const bool has_message = HasMessage();
  {
    MutexLock lock(&mutex_);
    const bool was_stopped = ticked_ns_ != 0 && now_ns > ticked_ns_ + kOwnStopNs;
    if (was_stopped) heard_ns_.store(now_ns);
    ticked_ns_ = now_ns;
    up = state_ == State::kUp;
    const bool dialing = state_ == State::kDialing;
    // Tick() may come before Dial(): the table can find the link first.
    const bool dialed = channel_ != nullptr;
    if (dialing && dialed && !has_message && !probing_ && ranks_.Overdue(now_ns)) {
      probing_ = true;
      probed = channel_;
      queue = queue_;
    } else if (up && !has_message && now_ns > heard_ns_.load() + kSilenceNs &&
               (now_ns > heard_ns_.load() + kUnreadNs || context_.sockets->UnreadBytes() == 0)) {
      cancel = true;
      if (cause_.empty())
        cause_ = WhySilent(now_ns > heard_ns_.load() + kUnreadNs ? kUnreadNs : kSilenceNs);
    } else if (up) {
      // A link whose job has never formed keeps no engine.
      const std::uint64_t idle_ns = engine_->engines_made() == 0 ? kUnusedNs : context_.idle_ns;
      idle = now_ns > idle_since_ns_ + idle_ns;
      // Two excuses: the answer may be among the messages that wait here, and the coordinator may
      // wait for what it has launched here.
      unended = ranks_.FindOverdueEnd(
          now_ns, was_stopped || has_message || engine_->busy() || workers_->busy());
    }
    // While a message waits for its turn, no ping is read. The first one is the Welcome.
    tell = has_message && (up || dialing) && now_ns >= told_ns_ + kPingPeriodNs;
    if (tell) told_ns_ = now_ns;
  }
  if (probed != nullptr) {
    ReachProbe::Start(probed, queue,
                      [self = Self()](const std::string& why) { self->OnProbed(why); });
  }
  if (tell) {
    v1::AttachRequest pong;
    pong.mutable_pong();
    Send(std::move(pong));
  }
  if (unended != nullptr) {
    Break(absl::StrCat("it did not end the session of rank ", unended->rank(), " within ",
                       ForwardingJob::kEndLimitNs / 1'000'000'000, " s"));
  }
  if (idle) Drop("it was idle");
  if (up) workers_->Tick();
  if (cancel) Cancel();
}

void CoordinatorLink::EndRanks(const absl::Status& why) {
  ForwardedRanks::Ranks ranks;
  std::vector<Waiting> waiting;
  bool dialing = false;
  {
    MutexLock lock(&mutex_);
    ranks = ranks_.All();
    waiting = ranks_.TakeWaiting();
    dialing = state_ == State::kDialing;
  }
  for (const Waiting& one : waiting) one.joined(why);
  if (dialing) Cancel();
  for (const auto& rank : ranks) rank->WillBeLost(why);
  for (const auto& rank : ranks) rank->Lose(rank->session(), why);
}

bool CoordinatorLink::EndIdle(const absl::Status& why) {
  bool up = false, detach = false;
  {
    MutexLock lock(&mutex_);
    if (ranks_.InStep()) return false;
    up = state_ == State::kUp;
    if (up && !detaching_.ok()) return false;
    detach = up && ranks_.unused();
    if (detach) detaching_ = why;
  }
  if (detach) {
    v1::AttachRequest message;
    message.mutable_detach();
    Send(std::move(message));
  } else {
    // The ranks are removed when the coordinator has answered.
    EndRanks(why);
  }
  return !up;
}

std::optional<RemoteJobSnapshot> CoordinatorLink::Snapshot(RemoteJobFilter wanted) {
  MutexLock lock(&mutex_);
  const bool dialing = state_ == State::kDialing && ranks_.waiting();
  if (!dialing && (state_ != State::kUp || ranks_.empty())) return std::nullopt;
  std::set<std::uint64_t> incarnations = ranks_.Incarnations();
  if (!wanted({key_.uid, key_.job_id, incarnations})) return std::nullopt;
  RemoteJobSnapshot job;
  job.uid = key_.uid;
  job.job_id = key_.job_id;
  job.coordinator = address_;
  job.node_name = coordinator_;
  job.connected = !dialing;
  job.heard_ns = heard_ns_.load();
  job.incarnations = std::move(incarnations);
  job.engine = engine_->Snapshot();
  return job;
}

bool CoordinatorLink::ended() {
  MutexLock lock(&mutex_);
  return state_ == State::kEnded;
}

bool CoordinatorLink::is_self() {
  MutexLock lock(&mutex_);
  return state_ == State::kSelf;
}

}  // namespace gradsync::daemon
