// Messages of the daemon that coordinates a job, to the node of two of its ranks. The fuzzer makes
// them, the messages of the ranks, and finishes exchanges between the nodes. One thread runs
// everything.
//
// The stream never begins, so gRPC is not called. Its messages stay in its queue.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/job/layout_plan.h"
#include "daemon/peer/coordinator_link.h"
#include "daemon/peer/user_rate.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/rank_dispatch.h"
#include "daemon/rpc/status_mapping.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/fuzzed_rank.h"
#include "tests/fuzz/held_engines.h"
#include "tests/fuzz/quiet_log.h"
#include "tests/fuzz/rank_messages.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kRanks = 2;  // here; rank 0 is elsewhere
constexpr int kMaxActions = 200;
constexpr std::uint64_t kMillisecond = 1'000'000;

DecodeLimits Limits() {
  DecodeLimits limits;
  limits.parameters = 16;
  limits.buckets = 8;
  limits.staging_bytes = FuzzedRank::kStagingBytes;
  return limits;
}

constexpr std::uint32_t kLayouts = 4;  // that the ranks register
constexpr std::uint64_t kManyElements = 2048;

// A layout of `which` + 1 small buckets. The last one is a large bucket, which lies beyond the
// memory of the others.
v1::SessionRequest LayoutMessage(std::uint32_t which) {
  v1::SessionRequest message = fuzz::LayoutMessage("a", which % (kLayouts - 1) + 1, 0);
  if (which == kLayouts - 1) {
    message.mutable_register_layout()->mutable_parameters(0)->set_shape(0, kManyElements);
  }
  return message;
}

const LayoutPlan& PlanOf(std::uint32_t which) {
  static const auto* const plans = [] {
    auto* const made = new std::vector<LayoutPlan>;
    for (std::uint32_t layout = 0; layout < kLayouts; ++layout) {
      const auto request = DecodeLayout(LayoutMessage(layout).register_layout(), {}, Limits(), 0);
      FUZZ_CHECK(request.ok());
      auto plan = PlanLayout(request->spec, Limits().buckets);
      FUZZ_CHECK(plan.ok());
      made->push_back(*std::move(plan));
    }
    return made;
  }();
  return (*plans)[which];
}

// The coordinator says that it is this daemon.
class NoJobsHere final : public JobFinder {
 public:
  void Join(const JoinRequest&, std::shared_ptr<SessionSink>,
            std::function<void(absl::StatusOr<Joined>)> joined) override {
    joined(absl::UnavailableError("there is no job here"));
  }
};

class World {
 public:
  explicit World(fuzz::ByteReader reader)
      : reader_(reader),
        link_(CoordinatorLink::Create(Context(), "alpha:7417", {1000, "fuzz", ""})) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) Join(rank);
    const std::uint32_t warm = reader_.Below(4);
    if (warm < 1) return;
    Take(Welcome());
    if (warm < 2) return;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) Take(Opened(rank));
    if (warm < 3) return;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      Send(rank, LayoutMessage(2));
      Take(Assigned(rank, 2));
      Send(rank, fuzz::MappedMessage(1));
    }
    Take(Connect(1));
  }

  void Run() {
    for (int i = 0; i < kMaxActions && !reader_.empty(); ++i) {
      Act();
      engines_.Await(link_->engines_made());
    }
    const absl::Status end = absl::UnavailableError("the fuzzer ends");
    link_->EndRanks(end);
    link_->OnEnd(absl::OkStatus());
    link_->OnFinished();
    for (int i = 0; i < 100 && !Quiet(); ++i) {
      engines_.FinishAll(end);
      reaper_.RunAll();
      executor_.RunAll();
    }
    FUZZ_CHECK(Quiet());
    // Every rank has its answers, and its memory is free.
    FUZZ_CHECK(answered_ == asked_);
    for (const auto& session : sessions_) {
      Hear(session.get());
      FUZZ_CHECK(session->Free());
    }
    FUZZ_CHECK(ended_ == sessions_.size());
  }

 private:
  LinkContext Context() {
    LinkContext context;
    context.payer = Tenant(1000);
    context.memory = &memory_;
    context.instance = std::string(kInstanceBytes, 'b');
    context.node_name = "beta";
    context.address = "127.0.0.1";
    context.staging_bytes = FuzzedRank::kStagingBytes;
    context.max_buckets = Limits().buckets;
    context.make_engine = engines_.Maker();
    context.executor = &executor_;
    context.reaper = &reaper_;
    context.clock = &clock_;
    context.tls = true;  // otherwise the kernel is asked who answers
    context.sockets = std::make_shared<DialedSockets>(/*plain_text=*/false);
    context.engine_rate = std::make_shared<UserRate>(/*burst=*/64);
    context.here = &here_;
    return context;
  }

  // ---- What happens

  void Act() {
    switch (reader_.Below(12)) {
      case 5:
        Send(reader_.Below(kRanks), LayoutMessage(reader_.Below(kLayouts)));
        return;
      case 6:
      case 7: {
        const std::uint32_t rank = reader_.Below(kRanks);
        const std::uint32_t newest = ranks_[rank] == nullptr ? 0 : ranks_[rank]->NewestChannel();
        Send(rank, fuzz::NextMessage(&reader_, newest, &counts_));
        return;
      }
      case 8:
        if (engines_.held() > 0) {
          engines_.Finish(reader_.Byte() % engines_.held(),
                          reader_.Below(8) == 7 ? absl::InternalError("broken") : absl::OkStatus());
        }
        return;
      case 9:
        engines_.FinishAll(absl::OkStatus());
        executor_.RunAll();
        reaper_.RunAll();
        return;
      case 10: {
        clock_.Advance(kMillisecond * reader_.Byte());
        link_->Tick(clock_.NowNs());
        return;
      }
      case 11:
        Unusual();
        return;
      default:
        Take(Message());
    }
  }

  void Unusual() {
    const std::uint32_t rank = reader_.Below(kRanks);
    switch (reader_.Below(4)) {
      case 0:
        Join(rank);
        return;
      case 1:
        if (ranks_[rank] == nullptr) return;
        ranks_[rank]->job().Lose(ranks_[rank]->session(), absl::AbortedError("it ended"));
        return;
      case 2:
        link_->EndIdle(absl::UnavailableError("the daemon is stopping"));
        return;
      default:
        engines_.FailNewest(absl::UnavailableError("a node is silent"));
    }
  }

  void Join(std::uint32_t rank) {
    JoinRequest join;
    join.key = {1000, "fuzz", ""};
    join.rank = rank + 1;
    join.world_size = kRanks + 1;
    join.incarnation = ++last_incarnation_;
    join.coordinator = "alpha:7417";
    join.patience_ns = ~std::uint64_t{0} / 4;
    join.message = std::make_shared<const v1::OpenSession>();
    const auto sink = std::make_shared<RecordingSink>();
    const auto joined = [this, rank, sink, session = RankSession{join.rank, join.incarnation}](
                            const absl::StatusOr<Joined>& job) {
      ++answered_;
      if (!job.ok()) return;
      sessions_.push_back(std::make_unique<FuzzedRank>(session, job->job, sink));
      ranks_[rank] = sessions_.back().get();
    };
    if (!link_->Join(join, sink, joined)) return;  // the link has ended
    ++asked_;
    if (incarnations_[rank] == 0 || reader_.Bool()) incarnations_[rank] = last_incarnation_;
  }

  // A message of a rank's trainer.
  void Send(std::uint32_t rank, const v1::SessionRequest& request) {
    FuzzedRank* const session = ranks_[rank];
    if (session == nullptr) return;
    const absl::Status status = TakeRankRequest(request, Limits(), clock_.NowNs(), session);
    if (!status.ok()) session->job().Lose(session->session(), status);
    Hear(session);
  }

  void Hear(FuzzedRank* session) {
    for (const SessionMessage& message : session->sink()->Take()) {
      if (std::holds_alternative<SessionEndMessage>(message)) ++ended_;
    }
  }

  void Take(const v1::AttachResponse& message) {
    link_->OnMessage(message);
    engines_.Await(link_->engines_made());
  }

  bool Quiet() { return engines_.held() == 0 && reaper_.empty() && executor_.pending() == 0; }

  // ---- Messages

  static v1::AttachResponse Welcome() {
    v1::AttachResponse message;
    message.mutable_welcome()->set_instance(std::string(kInstanceBytes, 'a'));
    message.mutable_welcome()->set_node_name("alpha");
    return message;
  }

  v1::AttachResponse Opened(std::uint32_t rank) const {
    v1::AttachResponse message;
    message.mutable_rank_response()->set_incarnation(incarnations_[rank]);
    message.mutable_rank_response()->mutable_response()->mutable_session_opened();
    return message;
  }

  v1::AttachResponse Assigned(std::uint32_t rank, std::uint32_t layout) {
    v1::AttachResponse message;
    message.mutable_rank_response()->set_incarnation(incarnations_[rank]);
    auto& assigned =
        *message.mutable_rank_response()->mutable_response()->mutable_layout_assigned();
    Encode(PlanOf(layout), &assigned);
    assigned.set_request_id(1);
    assigned.set_channel(1);
    return message;
  }

  static v1::AttachResponse Connect(std::uint64_t epoch) {
    v1::AttachResponse message;
    v1::ConnectEngine& connect = *message.mutable_connect_engine();
    connect.set_epoch(epoch);
    connect.set_node(1);
    connect.add_node_names("alpha");
    connect.add_node_names("beta");
    connect.set_address("127.0.0.1");
    connect.set_lanes(1);
    return message;
  }

  google::rpc::Status Status() {
    const std::uint32_t code = reader_.Below(20);
    return ToProto(absl::Status(static_cast<absl::StatusCode>(code), "why"));
  }

  std::uint32_t Channel(std::uint32_t rank) {
    const std::uint32_t newest = ranks_[rank] == nullptr ? 0 : ranks_[rank]->NewestChannel();
    return static_cast<std::uint32_t>(reader_.Number(newest));
  }

  v1::AttachResponse Message() {
    v1::AttachResponse message;
    const std::uint32_t rank = reader_.Below(kRanks);
    const auto epoch = [&] { return reader_.Number(epoch_); };
    switch (reader_.Below(16)) {
      case 0:
        message = Welcome();
        if (reader_.Below(4) == 0) {
          message.mutable_welcome()->set_instance(std::string(kInstanceBytes, 'b'));
        }
        break;
      case 1:
        message = reader_.Bool() ? Opened(rank) : Assigned(rank, reader_.Below(kLayouts));
        if (reader_.Below(4) == 0) {
          message.mutable_rank_response()->set_incarnation(reader_.Number(incarnations_[rank]));
        }
        break;
      case 2: {
        message = Assigned(rank, reader_.Below(kLayouts));
        auto& assigned =
            *message.mutable_rank_response()->mutable_response()->mutable_layout_assigned();
        assigned.set_channel(static_cast<std::uint32_t>(reader_.Number(Channel(rank) + 1)));
        if (reader_.Below(4) == 0) assigned.set_arena_bytes(reader_.Number(4096));
        if (reader_.Below(4) == 0) assigned.mutable_buckets(0)->set_count(reader_.Number(4));
        break;
      }
      case 3:
      case 4:
      case 5:
        message.mutable_rank_response()->set_incarnation(incarnations_[rank]);
        Respond(rank, message.mutable_rank_response()->mutable_response());
        break;
      case 6:
        if (reader_.Bool()) ++epoch_;
        message = Connect(epoch());
        if (reader_.Below(4) == 0) {
          message.mutable_connect_engine()->set_lanes(
              static_cast<std::uint32_t>(reader_.Number(1)));
        }
        if (reader_.Below(4) == 0) {
          message.mutable_connect_engine()->set_silence_limit_ms(reader_.Number(8000));
        }
        break;
      case 7:
      case 8:
      case 9:
      case 10:
        Launch(rank, message.mutable_launch());
        break;
      case 11:
        message.mutable_engine_end()->set_epoch(epoch());
        *message.mutable_engine_end()->mutable_status() = Status();
        break;
      case 12:
        message.mutable_rendezvous_value()->set_epoch(epoch());
        message.mutable_rendezvous_value()->set_key("watch/" + std::to_string(reader_.Below(4)));
        message.mutable_rendezvous_value()->set_value(reader_.Bytes(reader_.Below(64)));
        break;
      case 13:
        if (reader_.Bool()) {
          message.mutable_worker_call()->set_worker(reader_.Number(1));
          message.mutable_worker_call()->set_id(reader_.Number(1));
          message.mutable_worker_call()->set_call(reader_.Bytes(reader_.Below(32)));
        } else {
          message.mutable_worker_release()->set_worker(reader_.Number(1));
          *message.mutable_worker_release()->mutable_status() = Status();
        }
        break;
      case 14:
        message.mutable_ping()->set_number(reader_.Byte());
        break;
      default:
        if (!message.ParseFromString(reader_.Bytes(reader_.Byte()))) message.Clear();
    }
    return message;
  }

  void Launch(std::uint32_t rank, v1::Launch* launch) {
    launch->set_epoch(reader_.Number(epoch_));
    if (launched_of_ != epoch_) launched_ = 0;
    launched_of_ = epoch_;
    launch->set_sequence(reader_.Number(launched_ + 1));
    // The agent counts them, wrong ones too.
    if (launch->epoch() == epoch_) ++launched_;
    launch->set_dtype(v1::DATA_TYPE_FLOAT32);
    launch->set_count(reader_.Below(4) == 3 ? kManyElements : 4);
    launch->set_scale(0.5);
    launch->set_op(reader_.Below(4) == 3 ? static_cast<v1::ReduceOp>(reader_.Below(6))
                                         : v1::REDUCE_OP_SUM);
    launch->set_bucket(static_cast<std::uint32_t>(reader_.Number(reader_.Below(3))));
    launch->set_number(reader_.Number(counts_.step));
    for (std::uint32_t r = 0; r < kRanks; ++r) {
      if (reader_.Below(4) < 3) launch->add_incarnations(incarnations_[r]);
    }
    switch (reader_.Below(6)) {
      case 0:  // an all-reduce of the job's own channel
        launch->set_count(reader_.Number(16));
        launch->set_dtype(static_cast<v1::DataType>(reader_.Below(12)));
        break;
      case 1:  // a broadcast
        launch->set_count(reader_.Number(FuzzedRank::kStagingBytes));
        launch->set_root_node(static_cast<std::uint32_t>(reader_.Number(0)));
        break;
      default:
        launch->set_channel(Channel(rank));
        if (reader_.Below(8) == 0) launch->set_count(reader_.Number(4));
        if (reader_.Below(8) == 0) launch->set_dtype(static_cast<v1::DataType>(reader_.Below(12)));
    }
  }

  void Respond(std::uint32_t rank, v1::SessionResponse* response) {
    switch (reader_.Below(12)) {
      case 0:
        response->mutable_layout_ready()->set_channel(Channel(rank));
        return;
      case 1:
        response->mutable_bucket_done()->set_channel(Channel(rank));
        return;
      case 2:
      case 3: {
        v1::StepDone& done = *response->mutable_step_done();
        done.set_channel(Channel(rank));
        done.set_step(reader_.Number(counts_.step));
        if (done.step() == counts_.step) ++counts_.step;
        done.set_verdict(reader_.Bool() ? v1::VERDICT_COMPLETE : v1::VERDICT_VOID);
        return;
      }
      case 4:
        response->mutable_operation_failed()->set_layout(reader_.Bool());
        response->mutable_operation_failed()->set_sequence(reader_.Number(1));
        *response->mutable_operation_failed()->mutable_status() = Status();
        return;
      case 5: {
        v1::LeaveDone& done = *response->mutable_leave_done();
        for (std::uint32_t more = reader_.Below(3); more > 0; --more) {
          auto& next = *done.add_next_steps();
          next.set_channel(Channel(rank));
          next.set_step(reader_.Number(counts_.step));
        }
        return;
      }
      case 6:
        *response->mutable_session_ending()->mutable_status() = Status();
        return;
      case 7:
        response->mutable_operation_done()->set_sequence(reader_.Number(counts_.sequence));
        return;
      case 8:
        response->mutable_chunk_ready()->set_sequence(reader_.Number(counts_.sequence));
        return;
      case 9:
        response->mutable_step_state()->set_missing("rank 0");
        return;
      case 10:
        response->mutable_still_waiting();
        return;
      default:
        if (!response->ParseFromString(reader_.Bytes(reader_.Byte()))) response->Clear();
    }
  }

  fuzz::ByteReader reader_;
  ManualClock clock_;
  // At its end nobody is charged for anything.
  ArenaQuota memory_{std::uint64_t{1} << 20};
  ManualExecutor executor_;
  HeldExecutor reaper_;
  HeldEngines engines_;
  NoJobsHere here_;
  std::vector<std::unique_ptr<FuzzedRank>> sessions_;  // all that were ever open
  std::array<FuzzedRank*, kRanks> ranks_{};            // the last session of each
  std::array<std::uint64_t, kRanks> incarnations_{};
  std::uint64_t last_incarnation_ = 0;
  std::uint64_t asked_ = 0;     // to join
  std::uint64_t answered_ = 0;  // of those
  std::uint64_t ended_ = 0;     // sessions
  std::uint64_t epoch_ = 1;
  std::uint64_t launched_ = 0;  // in launched_of_
  std::uint64_t launched_of_ = 1;
  fuzz::RankCounts counts_;
  const std::shared_ptr<CoordinatorLink> link_;  // last: it uses the others
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::fuzz::QuietLog();
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
