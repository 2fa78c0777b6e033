#include "daemon/peer/agent_session.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/base/logging.h"
#include "daemon/peer/local_caller.h"
#include "daemon/peer/node_name.h"
#include "daemon/peer/peer_address.h"
#include "daemon/peer/peer_status.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/message_memory.h"
#include "daemon/worker/gpu_arena.h"
#include "proto/gradsync/limits.h"

namespace gradsync::daemon {
namespace {

// A caller that has not sent Hello is disconnected after this.
constexpr std::uint64_t kHelloPatienceNs = 10'000'000'000;
constexpr std::size_t kHashBytes = 32;
// A node that nothing needs is disconnected after this. Others may need the place. A daemon of ours
// has closed its stream long before, after 5 s. If the node is part of an engine, that is after 5
// minutes.
constexpr std::uint64_t kUnneededNs = 60'000'000'000;
constexpr std::uint64_t kUnneededEngineNs = 600'000'000'000;

// Incarnations of ranks on other nodes. Those of this node's sessions count from 1.
std::uint64_t NextIncarnation() {
  static std::atomic<std::uint64_t> last{std::uint64_t{1} << 62};
  return ++last;
}

// A node may say any number: the engine's own bounds hold in any case.
EngineLimits LimitsOf(const v1::Hello& hello) {
  EngineLimits limits;
  if (hello.engine_lanes() > 0) {
    limits.lanes =
        static_cast<int>(std::min(hello.engine_lanes(), std::uint32_t{EngineSettings::kMaxLanes}));
  }
  if (hello.engine_chunk_bytes() > 0) {
    constexpr std::uint64_t kMin = EngineSettings::kMinChunkBytes;
    limits.chunk_bytes = std::clamp<std::uint64_t>(hello.engine_chunk_bytes() / kMin * kMin, kMin,
                                                   EngineSettings::kMaxChunkBytes);
  }
  return limits;
}

// A message of a step or of an operation, or a part of one.
bool IsLight(const v1::SessionRequest& request) {
  switch (request.kind_case()) {
    case v1::SessionRequest::kBucketReady:
    case v1::SessionRequest::kEndStep:
    case v1::SessionRequest::kBroadcast:
    case v1::SessionRequest::kBarrier:
    case v1::SessionRequest::kAllReduce:
    case v1::SessionRequest::kChunkWritten:
    case v1::SessionRequest::kChunkRead:
    case v1::SessionRequest::kBeginCollective:
      return true;
    default:
      return false;
  }
}

// `message`: null if it is not parsed.
MessageWeight WeightOf(const v1::AttachRequest* message) {
  bool light = false;
  switch (message == nullptr ? v1::AttachRequest::KIND_NOT_SET : message->kind_case()) {
    case v1::AttachRequest::kPong:
      return MessageWeight::kUrgent;
    case v1::AttachRequest::kRankRequest:
      light = IsLight(message->rank_request().request());
      break;
    case v1::AttachRequest::kLaunchDone:
      light = !message->launch_done().has_status();  // a failure may end jobs
      break;
    case v1::AttachRequest::kWorkerReply:
      light = !message->worker_reply().has_status();
      break;
    default:
      break;
  }
  return light ? MessageWeight::kLight : MessageWeight::kHeavy;
}

// Estimates, in bytes, the memory of a message that this node has made. Cheap for messages of
// steps.
std::size_t UnreadBytes(const v1::AttachResponse& message) {
  // A message without lists takes at most this much, and so much for each byte on the wire.
  constexpr std::size_t kMessageBytes = 320, kBytesPerByte = 4;
  switch (message.kind_case()) {
    case v1::AttachResponse::kLaunch:
      return kMessageBytes + static_cast<std::size_t>(message.launch().incarnations().Capacity()) *
                                 sizeof(std::uint64_t);
    case v1::AttachResponse::kRankResponse:
      return kMessageBytes + QueuedBytes(message.rank_response().response());
    case v1::AttachResponse::kConnectEngine:
      return MemoryOf(message);
    default:
      return kMessageBytes + kBytesPerByte * message.ByteSizeLong();
  }
}

// Sends a job's messages to the rank whose session has this incarnation on its node.
class AgentSink final : public SessionSink {
 public:
  AgentSink(std::shared_ptr<AgentSession> node, std::uint64_t incarnation)
      : node_(std::move(node)), incarnation_(incarnation) {}

  void Queue(SessionMessage message) override { node_->QueueFor(incarnation_, std::move(message)); }
  void Flush() override { node_->Flush(); }

 private:
  const std::shared_ptr<AgentSession> node_;
  const std::uint64_t incarnation_;
};

}  // namespace

std::size_t AgentSession::BytesOf(const AgentItem& item) const {
  if (const auto* message = std::get_if<v1::AttachResponse>(&item)) return UnreadBytes(*message);
  const SessionMessage& message = std::get<JobMessage>(item).message;
  const auto* const done = std::get_if<StepDoneMessage>(&message);
  if (done == nullptr) return sizeof(JobMessage) + QueuedBytes(message);
  // The job itself keeps the last step's record, which all ranks share. Behind an older one that is
  // unread, it counts.
  const StepRecord* const before = waiting_record_.exchange(done->record.get());
  const bool costs = before != nullptr && before != done->record.get();
  return sizeof(JobMessage) + (costs ? QueuedBytes(message) : 0);
}

void AgentSession::Drained(std::size_t* granted) {
  waiting_record_.store(nullptr);
  charge_.Release();
  *granted = charge_.granted();
}

void AgentSession::ToWire(AgentItem item, v1::AttachResponse* out) {
  if (auto* message = std::get_if<v1::AttachResponse>(&item)) {
    *out = std::move(*message);
    return;
  }
  const JobMessage& message = std::get<JobMessage>(item);
  out->mutable_rank_response()->set_incarnation(message.incarnation);
  Encode(message.message, out->mutable_rank_response()->mutable_response());
}

void AgentSession::OnAccepted() {
  accepted_ns_ = context_.clock->NowNs();
  heard_ns_.store(accepted_ns_);
  address_ = HostOfCaller(caller());
  const std::optional<TcpEnd> end = EndOfCaller(caller());
  network_ = end.has_value() ? NetworkText(end->ip) : address_;
  if (!context_.caller_key) return;
  caller_key_ = context_.caller_key(caller());
  if (caller_key_ == CallerKey()) stranger_ = LocalStrangers();
}

void AgentSession::Close(const absl::Status& status) {
  std::uint64_t not_yet = 0;
  closed_ns_.compare_exchange_strong(not_yet, context_.clock->NowNs());
  Stream::Close(status);
}

void AgentSession::Tick(std::uint64_t now_ns) {
  if (!workers_.Tick(now_ns) && closed_ns_.load() == 0) {
    Close(MakeError(absl::StatusCode::kDeadlineExceeded, reason::kWorkerLost,
                    absl::StrCat("node ", node_name_, " (", address_,
                                 ") does not end a worker on a GPU that has failed: restart ",
                                 "gradsyncd on that node"),
                    {{field::kNode, node_name_}}));
  }
  // An agent that reads nothing would keep its place, even if it answers pings.
  const std::uint64_t closed_ns = closed_ns_.load();
  if (closed_ns != 0 && now_ns > closed_ns + kPeerSilenceNs) {
    Cancel();
    return;
  }
  // Asked first: when it has been handled, heard_ns_ says so. Until then no pong is read.
  const bool has_message = HasMessage();
  const std::uint64_t heard_ns = heard_ns_.load();
  if (!greeted()) {
    if (!has_message && now_ns > heard_ns + kHelloPatienceNs) Cancel();
    return;
  }
  // Counted from the first unanswered ping: a daemon that was stopped itself must ask first.
  const std::uint64_t asked_ns = asked_ns_.load();
  if (!has_message && asked_ns > heard_ns && now_ns > asked_ns + kPeerSilenceNs &&
      (now_ns > asked_ns + kUnreadSilenceNs || !context_.unread_bytes ||
       context_.unread_bytes(caller()) == 0)) {
    silent_.store(true);
    Cancel();
    return;
  }
  if (now_ns < pinged_ns_.load() + kPingPeriodNs) return;
  pinged_ns_.store(now_ns);
  if (asked_ns <= heard_ns) asked_ns_.store(now_ns);
  v1::AttachResponse ping;
  ping.mutable_ping()->set_number(now_ns);
  Send(std::move(ping));
}

absl::Status AgentSession::Malformed(absl::string_view what) const {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("node ", node_name_, " (", address_, "): ", what));
}

void AgentSession::InTurn(const LazyMessage<v1::AttachRequest>* message, UserTurns::Take take) {
  if (message != nullptr) Heard(message->Bytes());
  if (turns_ == nullptr) {
    turns_ = context_.turns->Of(greeted() ? Tenant(key_.uid) : stranger_);
    if (greeted()) address_turns_ = context_.turns->OfAddress(address_, network_);
  }
  // This session may end within the call.
  const auto turns = turns_;
  const auto address = address_turns_;
  const std::uint64_t begin_ns = context_.clock->NowNs();
  const v1::AttachRequest* parsed = nullptr;
  if (message != nullptr) {
    // A stranger's messages are heavy anyway.
    const bool parse = greeted() && turns->HasShare(begin_ns) && address->HasShare(begin_ns);
    parsed = parse ? message->IfShort() : message->IfParsed();
  }
  turns->Add(begin_ns, WeightOf(parsed), std::move(take), address);
}

void AgentSession::OnMessage(const LazyMessage<v1::AttachRequest>& received) {
  const std::uint64_t now_ns = context_.clock->NowNs();
  heard_ns_.store(now_ns);
  absl::Status status = Read(received);
  if (status.ok()) status = CheckNeed(now_ns);
  if (status.ok()) return;
  constexpr char kRefused[] = "node refused";
  if (key_.job_id.empty()) {
    // It has not said whose job it joins.
    LogLimitedByAddress(LogLevel::kWarning, kRefused,
                        {{"address", address_}, {"why", status.message()}});
  } else {
    LogLimitedByAddress(LogLevel::kWarning, kRefused,
                        {{"node", node_name_},
                         {"address", address_},
                         {"job", key_.job_id},
                         {"uid", key_.uid},
                         {"why", status.message()}});
  }
  LoseAll(status);
  Close(status);
}

void AgentSession::OnEnd(const absl::Status&) {
  const std::string who = absl::StrCat("the daemon of its node ", node_name_, " (", address_, ")");
  const std::string disconnected = WhyDisconnected();
  LoseAll(MakeError(
      absl::StatusCode::kUnavailable, reason::kNodeLost,
      silent_.load()
          ? absl::StrCat(who, " answered no ping for 5 s: it is stopped, or the link is down")
      : !disconnected.empty() ? absl::StrCat(who, " was disconnected: ", disconnected)
                              : absl::StrCat("the connection to ", who, " has ended"),
      {{field::kJob, key_.job_id}, {field::kNode, node_name_}}));
}

void AgentSession::LoseAll(const absl::Status& why) {
  for (auto& [incarnation, rank] : ranks_) rank.Lose(why);
  ranks_.clear();
  workers_.Lost(why);
  const std::shared_ptr<NodeGroup> node_group = std::move(node_group_);
  node_group_ = nullptr;
  if (node_group == nullptr) return;
  LogLimitedByAddress(LogLevel::kInfo, "node detached",
                      {{"node", node_name_},
                       {"address", address_},
                       {"job", key_.job_id},
                       {"uid", key_.uid},
                       {"why", why.message()}});
  node_group->Lost(this, why);
}

absl::Status AgentSession::Read(const LazyMessage<v1::AttachRequest>& received) {
  // All strangers have turns together, so what they send must not take long. A Hello is short.
  if (!greeted() && !received.IsShort()) return TakeOfStranger();
  const v1::AttachRequest* const message = received.Get();
  return message == nullptr ? Malformed("bytes that are no message") : Take(*message);
}

absl::Status AgentSession::TakeOfStranger() const {
  // It was refused, and does not know it yet.
  if (phase_.load() != Phase::kConnected) return absl::OkStatus();
  return Malformed("the first message is not Hello");
}

absl::Status AgentSession::Take(const v1::AttachRequest& message) {
  if (message.has_hello()) return OnHello(message.hello());
  if (node_group_ == nullptr) return TakeOfStranger();
  switch (message.kind_case()) {
    case v1::AttachRequest::kRankRequest:
      return OnRankRequest(message.rank_request());
    case v1::AttachRequest::kRefuseLayout: {
      AgentRank* const rank = Find(message.refuse_layout().incarnation());
      if (rank == nullptr) return absl::OkStatus();  // it has ended
      absl::Status why = StatusFromPeer(message.refuse_layout().status());
      if (why.ok()) return Malformed("RefuseLayout without a reason");
      rank->RefuseMemory(message.refuse_layout().channel(), why);
      return absl::OkStatus();
    }
    case v1::AttachRequest::kRankEnded: {
      AgentRank* const rank = Find(message.rank_ended().incarnation());
      if (rank == nullptr) return absl::OkStatus();  // it never joined
      absl::Status why = StatusFromPeer(message.rank_ended().status());
      if (why.ok()) why = absl::AbortedError("its session has ended");
      rank->Lose(why);
      ranks_.erase(message.rank_ended().incarnation());
      needed_ns_ = context_.clock->NowNs();
      return absl::OkStatus();
    }
    case v1::AttachRequest::kLaunchDone:
      return node_group_->LaunchDone(this, message.launch_done());
    case v1::AttachRequest::kRendezvousSet:
      return node_group_->RendezvousSet(this, message.rendezvous_set());
    case v1::AttachRequest::kRendezvousGet:
      return node_group_->RendezvousGet(std::static_pointer_cast<AgentSession>(shared_from_this()),
                                        message.rendezvous_get());
    case v1::AttachRequest::kGpuArenaMapped:
      return OnGpuArenaMapped(message.gpu_arena_mapped());
    case v1::AttachRequest::kWorkerReply:
      return workers_.Take(message.worker_reply());
    case v1::AttachRequest::kWorkerEnded: {
      absl::Status why = StatusFromPeer(message.worker_ended().status());
      if (why.ok()) return Malformed("WorkerEnded without a reason");
      workers_.Ended(message.worker_ended().worker(), why);
      return absl::OkStatus();
    }
    case v1::AttachRequest::kDetach:
      if (!ranks_.empty()) return Malformed("Detach from a node that still has ranks");
      if (phase_.exchange(Phase::kDetaching) == Phase::kDetaching) {
        return Malformed("Detach a second time");
      }
      node_group_->Detach(std::static_pointer_cast<AgentSession>(shared_from_this()));
      return absl::OkStatus();
    case v1::AttachRequest::kPong:
      return absl::OkStatus();
    case v1::AttachRequest::kHello:
    case v1::AttachRequest::KIND_NOT_SET:
      break;
  }
  return Malformed("a message of an unknown kind");
}

absl::Status AgentSession::OnHello(const v1::Hello& hello) {
  if (phase_.load() != Phase::kConnected) return Malformed("Hello a second time");
  phase_.store(Phase::kSaidHello);
  const bool printable =
      std::all_of(hello.job_id().begin(), hello.job_id().end(), absl::ascii_isprint);
  if (hello.instance().size() != kInstanceBytes || !IsNodeName(hello.node_name()) ||
      hello.job_id().empty() || hello.job_id().size() > kMaxJobIdBytes || !printable ||
      !(hello.token_hash().empty() || hello.token_hash().size() == kHashBytes)) {
    return Malformed("Hello with a field that is empty, too long or not printable");
  }
  // Nobody has this user id. Its turns are those of strangers, and they must be short.
  if (hello.uid() == kStrangers.uid) return Malformed("Hello for a job of no user");
  if (absl::Status allowed = CheckCaller(hello); !allowed.ok()) return allowed;
  if (hello.protocol() != kPeerProtocol) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kVersion,
                     absl::StrCat("node ", hello.node_name(), " speaks peer protocol ",
                                  hello.protocol(), ", node ", context_.node_name, " ",
                                  kPeerProtocol, ": upgrade the older of the two"));
  }
  v1::AttachResponse response;
  response.mutable_welcome()->set_instance(context_.instance);
  response.mutable_welcome()->set_node_name(context_.node_name);
  if (hello.instance() == context_.instance) {
    Send(std::move(response));
    return absl::OkStatus();  // it ends the stream
  }
  if (hello.staging_bytes() != context_.limits.staging_bytes) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNodeMismatch,
                     absl::StrCat("staging_bytes is ", hello.staging_bytes(), " on node ",
                                  hello.node_name(), ", ", context_.limits.staging_bytes,
                                  " on node ", context_.node_name, ": configure both alike"));
  }
  node_name_ = hello.node_name();
  engine_limits_ = LimitsOf(hello);
  key_ = JobKey{hello.uid(), hello.job_id(), hello.token_hash()};
  auto node_group = context_.find_node_group(key_);
  if (!node_group.ok()) return node_group.status();
  if (context_.addresses != nullptr) origin_ = context_.addresses->Of(address_, network_);
  node_group_ = *std::move(node_group);
  LogLimitedByAddress(
      LogLevel::kInfo, "node attached",
      {{"node", node_name_}, {"address", address_}, {"job", key_.job_id}, {"uid", key_.uid}});
  Send(std::move(response));
  needed_ns_ = context_.clock->NowNs();
  turns_ = nullptr;  // it has a user now
  phase_.store(Phase::kWelcomed);
  return absl::OkStatus();
}

absl::Status AgentSession::CheckNeed(std::uint64_t now_ns) {
  if (node_group_ == nullptr || now_ns < checked_ns_ + kPingPeriodNs) return absl::OkStatus();
  checked_ns_ = now_ns;
  const NodeGroup::Need need = node_group_->NeedOf(this);
  if (need == NodeGroup::Need::kRanks || phase_.load() == Phase::kDetaching) needed_ns_ = now_ns;
  const std::uint64_t limit_ns = need == NodeGroup::Need::kEngine ? kUnneededEngineNs : kUnneededNs;
  if (now_ns <= needed_ns_ + limit_ns) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kQuota,
      absl::StrCat("node ", node_name_, " (", address_, ") has had no rank in job '", key_.job_id,
                   "' for ", limit_ns / 1'000'000'000, " s, and other nodes may need its place"),
      {{field::kJob, key_.job_id}, {field::kNode, node_name_}});
}

// Without TLS anyone can say Hello in the name of any user. On this machine the kernel knows who
// does: only a daemon may, which is root or has this daemon's user.
absl::Status AgentSession::CheckCaller(const v1::Hello& hello) const {
  if (context_.tls) return absl::OkStatus();
  const std::string address = caller();
  SocketTable* const sockets = CanFindOwners() ? nullptr : context_.sockets;
  const std::string stranger = WhyStranger(
      address, [&] { return context_.own_ends(address); }, sockets, accepted_ns_);
  if (stranger.empty()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kPermissionDenied, reason::kPeerRefused,
      absl::StrCat("node '", hello.node_name(), "' is ", stranger, ": only root and user ",
                   geteuid(), " may call the peer port, which has no TLS"),
      {{field::kJob, hello.job_id()}});
}

AgentRank* AgentSession::Find(std::uint64_t incarnation) {
  const auto found = ranks_.find(incarnation);
  return found == ranks_.end() ? nullptr : &found->second;
}

absl::Status AgentSession::OnRankRequest(const v1::RankRequest& request) {
  if (request.request().has_open_session()) {
    const auto sink = std::make_shared<AgentSink>(
        std::static_pointer_cast<AgentSession>(shared_from_this()), request.incarnation());
    const absl::Status opened = Open(request, sink);
    if (opened.ok()) return absl::OkStatus();
    LogRefusal(request.rank(), opened);
    sink->Queue(SessionEndMessage{opened});
    sink->Flush();
    return absl::OkStatus();
  }
  AgentRank* const rank = Find(request.incarnation());
  if (rank == nullptr) return absl::OkStatus();  // it was refused or has ended
  if (rank->rank() != request.rank()) {
    return Malformed(absl::StrCat("incarnation ", request.incarnation(), " is rank ", rank->rank(),
                                  ", not ", request.rank()));
  }
  const absl::Status status =
      TakeRankRequest(request.request(), context_.limits, context_.clock->NowNs(), rank);
  if (!status.ok()) Refuse(rank, status);
  return absl::OkStatus();
}

void AgentSession::LogRefusal(std::uint32_t rank, const absl::Status& why) const {
  LogLimitedByAddress(LogLevel::kWarning, "session refused",
                      {{"job", key_.job_id},
                       {"rank", rank},
                       {"node", node_name_},
                       {"address", address_},
                       {"uid", key_.uid},
                       {"why", why.message()}});
}

void AgentSession::Refuse(AgentRank* rank, const absl::Status& why) {
  LogRefusal(rank->rank(), why);
  rank->Lose(why);
}

absl::Status AgentSession::OnGpuArenaMapped(const v1::GpuArenaMapped& mapped) {
  AgentRank* const rank = Find(mapped.incarnation());
  if (rank == nullptr) return absl::OkStatus();  // it has ended
  if (mapped.device().empty()) return Malformed("GpuArenaMapped without a device");
  const auto worker = workers_.Find(std::static_pointer_cast<AgentSession>(shared_from_this()),
                                    mapped.worker(), mapped.device());
  if (!worker.ok()) return worker.status();
  const absl::Status status = rank->GpuArenaMapped(
      mapped.channel(),
      GpuArena::OfOtherNode({key_.Text(), mapped.device(), Tenant(key_.uid), key_.job_id}, *worker,
                            mapped.arena()));
  if (!status.ok()) Refuse(rank, status);
  return absl::OkStatus();
}

absl::Status AgentSession::Open(const v1::RankRequest& request,
                                const std::shared_ptr<SessionSink>& sink) {
  const v1::OpenSession& open = request.request().open_session();
  std::uint32_t protocol = 0;
  auto decoded = DecodeOpen(open, &protocol);
  if (!decoded.ok()) return decoded.status();
  if (decoded->rank != request.rank() || decoded->job_id != key_.job_id ||
      ranks_.count(request.incarnation()) > 0) {
    return Malformed("OpenSession for another rank or job, or a second one");
  }
  if (phase_.load() == Phase::kDetaching) {
    return MakeError(
        absl::StatusCode::kUnavailable, reason::kDraining,
        absl::StrCat("the daemon of node ", node_name_, " is stopping; join again when it is back"),
        {{field::kJob, key_.job_id}, {field::kNode, node_name_}});
  }
  if (ranks_.size() >= kMaxRanksPerNode) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                     absl::StrCat("node ", node_name_, " has ", ranks_.size(), " ranks in job '",
                                  key_.job_id, "'"));
  }
  // This daemon may have begun to drain since Hello.
  const auto node_group = context_.find_node_group(key_);
  if (!node_group.ok()) return node_group.status();
  const std::uint64_t incarnation = NextIncarnation();
  auto job = context_.jobs->Join(key_, decoded->rank, decoded->world_size, decoded->options,
                                 incarnation, sink, {node_name_, {}, origin_});
  if (!job.ok()) return job.status();
  const AgentRank::Place place{decoded->rank, request.incarnation(), incarnation,
                               context_.limits.staging_bytes};
  AgentRank& rank =
      ranks_.try_emplace(request.incarnation(), place, *job, this, Memory()).first->second;
  node_group_->AddRank(*job, decoded->rank,
                       std::static_pointer_cast<AgentSession>(shared_from_this()),
                       request.incarnation());
  needed_ns_ = context_.clock->NowNs();
  LogLimitedByAddress(LogLevel::kInfo, "session opened",
                      {{"job", key_.job_id},
                       {"rank", decoded->rank},
                       {"world_size", decoded->world_size},
                       {"generation", (*job)->identity().generation},
                       {"node", node_name_},
                       {"address", address_},
                       {"uid", key_.uid}});
  v1::SessionResponse response;
  response.mutable_session_opened()->set_protocol(protocol);
  response.mutable_session_opened()->set_generation((*job)->identity().generation);
  rank.Respond(std::move(response));
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
