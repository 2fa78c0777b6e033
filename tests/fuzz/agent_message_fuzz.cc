// Messages of other nodes' daemons, to the node that coordinates their job. One rank is on node
// beta, one on node gamma, and mostly one on this node. The fuzzer makes their messages, finishes
// exchanges between the nodes, and loses nodes and ranks, in its own order. One thread runs
// everything. Layouts may be on GPUs of the other nodes, whose workers the fuzzer plays too.
//
// The streams never begin, so gRPC is not called. Their messages stay in their queues.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/node_group_table.h"
#include "daemon/rpc/rank_dispatch.h"
#include "daemon/rpc/status_mapping.h"
#include "daemon/worker/gpu_reducer.h"
#include "daemon/worker/worker.pb.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/fuzzed_rank.h"
#include "tests/fuzz/held_engines.h"
#include "tests/fuzz/quiet_log.h"
#include "tests/fuzz/rank_messages.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kNodes = 2;  // others
constexpr int kMaxActions = 200;
constexpr std::uint64_t kMillisecond = 1'000'000;
const char kJob[] = "fuzz";
constexpr uid_t kUser = 1000;

class World {
 public:
  explicit World(fuzz::ByteReader reader)
      : reader_(reader), jobs_(Jobs(), 4), node_groups_(Groups()), context_(Agents()) {
    const std::uint32_t start = reader_.Byte();
    const std::uint32_t warm = start % 4;
    first_ = start / 4 % 2 == 0 ? 1 : 0;
    Join();
    for (std::uint32_t node = 0; node < kNodes; ++node) Attach(node);
    if (warm < 1) return;
    for (std::uint32_t node = 0; node < kNodes; ++node) Take(node, Hello(node));
    if (warm < 2) return;
    for (std::uint32_t node = 0; node < kNodes; ++node) Take(node, Open(node));
    if (warm < 3) return;
    for (const bool mapped : {false, true}) {
      const auto message = mapped ? fuzz::MappedMessage(1) : fuzz::LayoutMessage("a", 3, 0);
      TakeHere(message);
      for (std::uint32_t node = 0; node < kNodes; ++node) Take(node, RankRequest(node, message));
    }
    Tick();
  }

  void Run() {
    for (int i = 0; i < kMaxActions && !reader_.empty(); ++i) {
      Act();
      engines_.Await(node_groups_.engines_made());
    }
    const absl::Status end = absl::UnavailableError("the fuzzer ends");
    node_groups_.Refuse();
    for (const auto& agent : agents_) agent->OnEnd(end);
    jobs_.EndAll(end);
    node_groups_.Shutdown();
    engines_.Await(node_groups_.engines_made());
    // Each may make work for the others.
    for (int i = 0; i < 100 && !Quiet(); ++i) {
      engines_.FinishAll(end);
      reaper_.RunAll();
      executor_.RunAll();
      reducer_.CompleteAll();
      for (const auto& agent : agents_) agent->OnEnd(end);
    }
    FUZZ_CHECK(Quiet());
    jobs_.Tick();
    executor_.RunAll();
    for (const auto& job : jobs_.Jobs()) FUZZ_CHECK(job->Empty());
    for (const auto& rank : sessions_) FUZZ_CHECK(rank->Free());
  }

 private:
  JobEnvironment Jobs() {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    environment.node_name = "alpha";
    environment.memory = &memory_;
    environment.gpu_reducer = &gpu_reducer_;
    return environment;
  }
  NodeGroupEnvironment Groups() {
    NodeGroupEnvironment environment;
    environment.node_name = "alpha";
    environment.address = "127.0.0.1";
    environment.make_engine = engines_.Maker();
    environment.reaper = &reaper_;
    environment.executor = &executor_;
    environment.clock = &clock_;
    return environment;
  }
  AgentSessionContext Agents() {
    AgentSessionContext context;
    context.instance = std::string(kInstanceBytes, 'a');
    context.node_name = "alpha";
    context.limits.parameters = 16;
    context.limits.buckets = 8;
    context.limits.staging_bytes = FuzzedRank::kStagingBytes;
    context.clock = &clock_;
    context.jobs = &jobs_;
    context.memory = &memory_;
    context.tls = true;  // otherwise the kernel is asked who calls
    context.find_node_group = [this](const JobKey& key) { return node_groups_.Find(key); };
    return context;
  }

  // ---- What happens

  void Act() {
    switch (reader_.Below(16)) {
      case 8:
        TakeHere(fuzz::NextMessage(&reader_, Newest(), &counts_));
        return;
      case 9:
        if (here_ != nullptr) {
          TakeHere(fuzz::NextMessage(&reader_, Newest(), &counts_));
        } else {
          Join();
        }
        return;
      case 10:
        if (engines_.held() > 0) {
          engines_.Finish(reader_.Byte() % engines_.held(),
                          reader_.Below(8) == 7 ? absl::InternalError("broken") : absl::OkStatus());
        }
        return;
      case 11:
        engines_.FinishAll(absl::OkStatus());
        reducer_.CompleteAll();
        executor_.RunAll();
        reaper_.RunAll();
        return;
      case 12:
        clock_.Advance(kMillisecond * (reader_.Bool() ? 1 : 20 * reader_.Byte()));
        Tick();
        return;
      case 13:
        Unusual();
        return;
      default: {
        const std::uint32_t node = reader_.Below(kNodes);
        Take(node, Message(node));
      }
    }
  }

  void Unusual() {
    const std::uint32_t node = reader_.Below(kNodes);
    switch (reader_.Below(4)) {
      case 0:
        if (here_ != nullptr) here_->job().Lose(here_->session(), absl::AbortedError("it ended"));
        return;
      case 1:
        Join();
        return;
      case 2:
        agents_[node]->OnEnd(absl::OkStatus());
        Attach(node);
        return;
      default:
        engines_.FailNewest(absl::UnavailableError("a node is silent"));
    }
  }

  void Tick() {
    jobs_.Tick();
    node_groups_.Tick();
    engines_.Await(node_groups_.engines_made());
  }

  void Attach(std::uint32_t node) {
    agents_[node] = std::make_shared<AgentSession>(context_, nullptr);
    agents_[node]->OnAccepted();
    incarnations_[node] = ++last_incarnation_;
  }

  // Rank 0, unless it is on node beta.
  void Join() {
    if (first_ == 0) return;
    JoinRequest join;
    join.key = {kUser, kJob, ""};
    join.world_size = kNodes + first_;
    join.options.step_timeout_ns = 1000 * kMillisecond;
    join.incarnation = ++last_incarnation_;
    const auto sink = std::make_shared<RecordingSink>();
    jobs_.Join(join, sink, [&](const absl::StatusOr<Joined>& joined) {
      if (!joined.ok()) return;
      sessions_.push_back(
          std::make_unique<FuzzedRank>(RankSession{0, join.incarnation}, joined->job, sink));
      here_ = sessions_.back().get();
    });
  }

  void TakeHere(const v1::SessionRequest& request) {
    if (here_ == nullptr) return;
    const absl::Status status = TakeRankRequest(request, context_.limits, clock_.NowNs(), here_);
    if (!status.ok()) here_->job().Lose(here_->session(), status);
    for (const SessionMessage& message : here_->sink()->Take()) {
      if (const auto* done = std::get_if<StepDoneMessage>(&message)) {
        counts_.step = std::max(counts_.step, done->record->times.step + 1);
      }
    }
  }

  void Take(std::uint32_t node, const v1::AttachRequest& message) {
    agents_[node]->OnMessage(message);
    engines_.Await(node_groups_.engines_made());
  }

  bool Quiet() {
    return engines_.held() == 0 && reaper_.empty() && executor_.pending() == 0 &&
           reducer_.held().empty();
  }

  // ---- Messages

  std::uint32_t Newest() const { return here_ == nullptr ? 1 : here_->NewestChannel(); }

  static v1::AttachRequest Hello(std::uint32_t node) {
    v1::AttachRequest message;
    v1::Hello& hello = *message.mutable_hello();
    hello.set_protocol(kPeerProtocol);
    hello.set_instance(std::string(kInstanceBytes, static_cast<char>('b' + node)));
    hello.set_node_name(node == 0 ? "beta" : "gamma");
    hello.set_uid(kUser);
    hello.set_job_id(kJob);
    hello.set_staging_bytes(FuzzedRank::kStagingBytes);
    return message;
  }

  v1::AttachRequest RankRequest(std::uint32_t node, const v1::SessionRequest& request) {
    v1::AttachRequest message;
    message.mutable_rank_request()->set_rank(first_ + node);
    message.mutable_rank_request()->set_incarnation(incarnations_[node]);
    *message.mutable_rank_request()->mutable_request() = request;
    return message;
  }

  v1::AttachRequest Open(std::uint32_t node) {
    v1::SessionRequest request;
    v1::OpenSession& open = *request.mutable_open_session();
    open.mutable_protocol()->set_oldest(0);
    open.mutable_protocol()->set_newest(1'000'000);
    open.set_shared_memory_abi(kSharedMemoryAbi);
    open.set_job_id(kJob);
    open.set_rank(first_ + node);
    open.set_world_size(kNodes + first_);
    open.mutable_options()->set_step_timeout_ms(1000);
    return RankRequest(node, request);
  }

  google::rpc::Status Status() {
    const std::uint32_t code = reader_.Below(20);
    return ToProto(absl::Status(static_cast<absl::StatusCode>(code), "why"));
  }

  // To the node's next unanswered call.
  v1::AttachRequest WorkerReply(std::uint32_t node) {
    v1::AttachRequest message;
    worker::Reply reply;
    switch (reader_.Below(4)) {
      case 0:
        reply.mutable_nccl_id()->set_unique_id(std::string(128, 'x'));
        break;
      case 1:
        reply.mutable_connected();
        break;
      case 2:
        reply.mutable_launch_done()->set_void_step(reader_.Below(8) == 7);
        break;
      default:
        break;
    }
    message.mutable_worker_reply()->set_worker(1);
    message.mutable_worker_reply()->set_id(reader_.Number(++worker_replies_[node]));
    message.mutable_worker_reply()->set_reply(reply.SerializeAsString());
    if (reader_.Below(16) == 15) *message.mutable_worker_reply()->mutable_status() = Status();
    return message;
  }

  v1::AttachRequest Message(std::uint32_t node) {
    v1::AttachRequest message;
    const auto incarnation = [&] { return reader_.Number(incarnations_[node]); };
    const auto epoch = [&] { return reader_.Number(node_groups_.engines_made()); };
    switch (reader_.Below(27)) {
      case 0:
        message = Hello(node);
        if (reader_.Below(4) == 0) message.mutable_hello()->set_uid(reader_.Byte());
        if (reader_.Below(4) == 0) message.mutable_hello()->set_token_hash(reader_.Bytes(32));
        if (reader_.Below(4) == 0) message.mutable_hello()->set_protocol(reader_.Byte());
        if (reader_.Below(4) == 0) message.mutable_hello()->set_instance(context_.instance);
        break;
      case 1:
        if (reader_.Bool()) incarnations_[node] = ++last_incarnation_;
        message = Open(node);
        if (reader_.Below(4) == 0) message.mutable_rank_request()->set_rank(reader_.Byte());
        break;
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
      case 9:
        message = RankRequest(node, fuzz::NextMessage(&reader_, Newest(), &counts_));
        if (reader_.Below(16) == 0) message.mutable_rank_request()->set_rank(reader_.Byte());
        if (reader_.Below(16) == 0) {
          message.mutable_rank_request()->set_incarnation(incarnation());
        }
        break;
      case 10:
        message.mutable_refuse_layout()->set_incarnation(incarnation());
        message.mutable_refuse_layout()->set_channel(
            static_cast<std::uint32_t>(reader_.Number(Newest())));
        *message.mutable_refuse_layout()->mutable_status() = Status();
        break;
      case 11:
        message.mutable_rank_ended()->set_incarnation(incarnation());
        *message.mutable_rank_ended()->mutable_status() = Status();
        break;
      case 12:
      case 13:
      case 14:
      case 15:
        if (const std::uint64_t now = node_groups_.engines_made(); answered_of_ != now) {
          answered_of_ = now;
          answered_ = {};
        }
        message.mutable_launch_done()->set_epoch(epoch());
        message.mutable_launch_done()->set_sequence(reader_.Number(answered_[node] + 1));
        if (message.launch_done().sequence() == answered_[node] + 1) ++answered_[node];
        if (reader_.Below(8) == 7) *message.mutable_launch_done()->mutable_status() = Status();
        message.mutable_launch_done()->set_non_finite(reader_.Below(2));
        break;
      case 16:
        message.mutable_rendezvous_set()->set_epoch(epoch());
        message.mutable_rendezvous_set()->set_key("watch/" + std::to_string(reader_.Below(4)));
        message.mutable_rendezvous_set()->set_value(reader_.Bytes(reader_.Below(64)));
        break;
      case 17:
        message.mutable_rendezvous_get()->set_epoch(epoch());
        message.mutable_rendezvous_get()->set_key("watch/" + std::to_string(reader_.Below(4)));
        break;
      case 18:
        message.mutable_gpu_arena_mapped()->set_incarnation(incarnation());
        message.mutable_gpu_arena_mapped()->set_channel(
            static_cast<std::uint32_t>(reader_.Number(Newest())));
        message.mutable_gpu_arena_mapped()->set_arena(reader_.Number(1));
        message.mutable_gpu_arena_mapped()->set_worker(reader_.Number(1));
        message.mutable_gpu_arena_mapped()->set_device(reader_.Bool() ? "GPU-0" : "GPU-1");
        break;
      case 19:
        message.mutable_worker_reply()->set_worker(reader_.Number(1));
        message.mutable_worker_reply()->set_id(reader_.Number(1));
        message.mutable_worker_reply()->set_ended(reader_.Bool());
        message.mutable_worker_reply()->set_reply(reader_.Bytes(reader_.Below(32)));
        break;
      case 24: {
        v1::SessionRequest request = fuzz::LayoutMessage("a", 1 + reader_.Below(2), 0);
        request.mutable_register_layout()->set_device("GPU-0");
        message = RankRequest(node, request);
        break;
      }
      case 25:
        message.mutable_gpu_arena_mapped()->set_incarnation(incarnations_[node]);
        message.mutable_gpu_arena_mapped()->set_channel(
            static_cast<std::uint32_t>(reader_.Number(Newest())));
        message.mutable_gpu_arena_mapped()->set_arena(1);
        message.mutable_gpu_arena_mapped()->set_worker(1);
        message.mutable_gpu_arena_mapped()->set_device("GPU-0");
        break;
      case 26:
        message = WorkerReply(node);
        break;
      case 20:
        message.mutable_worker_ended()->set_worker(reader_.Number(1));
        *message.mutable_worker_ended()->mutable_status() = Status();
        break;
      case 21:
        message.mutable_detach();
        break;
      case 22:
        message.mutable_pong()->set_number(reader_.Byte());
        break;
      default:
        if (!message.ParseFromString(reader_.Bytes(reader_.Byte()))) message.Clear();
    }
    return message;
  }

  fuzz::ByteReader reader_;
  ManualClock clock_;
  ArenaQuota memory_{std::uint64_t{1} << 20};  // outlives what the executor frees
  HeldReducer reducer_{&clock_};
  GpuReducer gpu_reducer_{CollectiveGate::kAllNodes};
  ManualExecutor executor_;
  HeldExecutor reaper_;
  HeldEngines engines_;
  std::uint32_t first_ = 1;  // rank on another node
  JobTable jobs_;
  NodeGroupTable node_groups_;
  const AgentSessionContext context_;
  std::vector<std::unique_ptr<FuzzedRank>> sessions_;  // of rank 0, all that were ever open
  FuzzedRank* here_ = nullptr;                         // the last one
  std::array<std::shared_ptr<AgentSession>, kNodes> agents_;
  std::array<std::uint64_t, kNodes> incarnations_{};  // of the node's rank
  std::uint64_t answered_of_ = 0;                     // epoch
  std::array<std::uint64_t, kNodes> answered_{};      // its launches
  std::array<std::uint64_t, kNodes> worker_replies_{};
  std::uint64_t last_incarnation_ = 0;
  fuzz::RankCounts counts_;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::QuietLog();
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
