// A whole job under messages of its ranks that a fuzzer chooses: whole steps, operations, layouts
// that are registered, replaced and released, losses, replacements and their state. One thread runs
// everything: messages, reductions, copies and the clock come in the fuzzer's order.
//
// The session of a rank that breaks the protocol ends, as in the daemon. The sanitizers check every
// access to the ranks' memory. At the end nothing refers to any of it.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/error.h"
#include "daemon/job/job.h"
#include "daemon/rpc/rank_dispatch.h"
#include "gradsync/v1/gradsync.pb.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr std::size_t kStagingBytes = 4096;
constexpr std::size_t kMaxArenaBytes = std::size_t{1} << 20;
constexpr int kMaxActions = 400;
constexpr std::uint64_t kMillisecond = 1'000'000;

// One session of a rank, with its memory.
class FuzzedRank final : public RankPort {
 public:
  FuzzedRank(RankSession session, std::shared_ptr<Job> job)
      : session_(session), job_(std::move(job)), sink_(std::make_shared<RecordingSink>()) {
    window_ = std::shared_ptr<std::byte[]>(new std::byte[kStagingBytes]());
  }

  RankSession session() const override { return session_; }
  JobPort& job() const override { return *job_; }
  const std::shared_ptr<RecordingSink>& sink() const { return sink_; }

  absl::Status ArenaMapped(std::uint32_t channel) override {
    for (const Arena& arena : arenas_) {
      if (arena.channel == channel) {
        return job_->ArenaMapped(session_, channel, arena.memory->Share());
      }
    }
    return absl::InvalidArgumentError("no arena");
  }
  absl::StatusOr<StagingMemory> Staging() override {
    return StagingMemory{window_, window_.get(), kStagingBytes};
  }
  absl::Status RegisterLayout(LayoutRequest request) override {
    const auto registration = job_->RegisterLayout(session_, std::move(request));
    if (!registration.ok()) return absl::OkStatus();  // a refusal: the session lives
    if (registration->plan.arena_bytes > kMaxArenaBytes) {
      job_->RefuseLayout(session_, registration->channel, absl::ResourceExhaustedError("quota"));
      return absl::OkStatus();
    }
    arenas_.push_back({registration->channel,
                       std::make_unique<TrainerMemory>(registration->plan.arena_bytes,
                                                       registration->plan.buckets.size())});
    return absl::OkStatus();
  }
  void Respond(v1::SessionResponse) override {}

  // Nothing of the daemon refers to this session's memory.
  bool Free() const {
    for (const Arena& arena : arenas_) {
      if (arena.memory->Shared()) return false;
    }
    return window_.use_count() == 1;
  }
  std::uint32_t NewestChannel() const { return arenas_.empty() ? 0 : arenas_.back().channel; }

 private:
  struct Arena {
    std::uint32_t channel;
    std::unique_ptr<TrainerMemory> memory;
  };

  const RankSession session_;
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<RecordingSink> sink_;
  std::shared_ptr<std::byte[]> window_;
  std::vector<Arena> arenas_;
};

class World {
 public:
  explicit World(fuzz::ByteReader reader) : reader_(reader) {
    options_.divide_by_world = reader_.Bool();
    options_.step_timeout_ns = 1000 * kMillisecond;
    if (reader_.Bool()) {
      options_.on_rank_loss = OnRankLoss::kHold;
      options_.hold_timeout_ns = 5000 * kMillisecond;
      if (reader_.Bool()) options_.state_source = StateSource::kSurvivor;
    }
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    job_ =
        std::make_shared<Job>(JobIdentity{1000, "fuzz", "", 1, {}}, kRanks, options_, environment);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) Join(rank);
    if (reader_.Bool()) {
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) Take(rank, Layout("a", 3, 0));
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) Take(rank, Mapped(1));
    }
  }

  void Run() {
    for (int i = 0; i < kMaxActions && !reader_.empty(); ++i) Act();
    job_->End(absl::UnavailableError("the fuzzer ends"));
    // Copies may submit reductions, and the other way round.
    for (int i = 0; i < 100 && (executor_.pending() > 0 || !reducer_.held().empty()); ++i) {
      executor_.RunAll();
      reducer_.CompleteAll();
    }
    FUZZ_CHECK(executor_.pending() == 0 && reducer_.held().empty());
    FUZZ_CHECK(job_->Empty());
    for (const auto& rank : sessions_) FUZZ_CHECK(rank->Free());
  }

 private:
  void Act() {
    switch (reader_.Below(16)) {
      case 10:
        if (!reducer_.held().empty()) {
          reducer_.Complete(reducer_.held()[reader_.Byte() % reducer_.held().size()]);
        }
        return;
      case 11:
        reducer_.CompleteAll();
        executor_.RunAll();
        return;
      case 12:
        if (executor_.pending() > 0) executor_.RunNext();
        return;
      case 13:
        clock_.Advance(kMillisecond * (reader_.Bool() ? 1 : 20 * reader_.Byte()));
        job_->Tick();
        return;
      case 14: {
        const std::uint32_t rank = reader_.Below(kRanks);
        Lose(rank, absl::AbortedError("its process has ended"));
        return;
      }
      case 15:
        Join(reader_.Below(kRanks));
        return;
      default: {
        const std::uint32_t rank = reader_.Below(kRanks);
        Take(rank, Message(rank));
      }
    }
  }

  void Join(std::uint32_t rank) {
    auto session = std::make_unique<FuzzedRank>(RankSession{rank, ++incarnations_}, job_);
    if (!job_->Join(rank, kRanks, options_, incarnations_, session->sink()).ok()) return;
    ranks_[rank] = session.get();
    sessions_.push_back(std::move(session));
  }

  void Lose(std::uint32_t rank, const absl::Status& why) {
    if (ranks_[rank] != nullptr) job_->Lose(ranks_[rank]->session(), why);
  }

  void Take(std::uint32_t rank, const v1::SessionRequest& request) {
    if (ranks_[rank] == nullptr) return;
    DecodeLimits limits;
    limits.parameters = 16;
    limits.buckets = 8;
    limits.staging_bytes = kStagingBytes;
    const absl::Status status = TakeRankRequest(request, limits, clock_.NowNs(), ranks_[rank]);
    if (!status.ok()) Lose(rank, status);
    Learn(rank);
  }

  // What a trainer reads in the daemon's messages: without it the fuzzer would have to guess.
  void Learn(std::uint32_t rank) {
    for (const SessionMessage& message : ranks_[rank]->sink()->Take()) {
      if (const auto* done = std::get_if<StepDoneMessage>(&message)) {
        if (done->record->times.step >= step_) step_ = done->record->times.step + 1;
      }
    }
  }

  static v1::SessionRequest Layout(const std::string& name, std::uint32_t buckets,
                                   std::uint32_t replaces) {
    v1::SessionRequest request;
    v1::RegisterLayout& layout = *request.mutable_register_layout();
    layout.set_name(name);
    layout.set_request_id(1);
    layout.set_bucket_cap_bytes(16);
    layout.set_first_bucket_cap_bytes(16);
    layout.set_timeout_ms(1000);
    layout.set_op(v1::REDUCE_OP_AVERAGE);
    layout.set_replaces(replaces);
    for (std::uint32_t i = 0; i < buckets; ++i) {
      v1::Parameter& parameter = *layout.add_parameters();
      parameter.set_name(std::string(1, static_cast<char>('a' + i)));
      parameter.add_shape(4);
      parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
    }
    return request;
  }

  static v1::SessionRequest Mapped(std::uint32_t channel) {
    v1::SessionRequest request;
    request.mutable_arena_mapped()->set_channel(channel);
    return request;
  }

  v1::SessionRequest Message(std::uint32_t rank) {
    v1::SessionRequest request;
    const std::uint32_t newest = ranks_[rank] == nullptr ? 0 : ranks_[rank]->NewestChannel();
    const auto channel = [&] { return static_cast<std::uint32_t>(reader_.Number(newest)); };
    switch (reader_.Below(24)) {
      case 0:
      case 1:
      case 2: {
        auto& ready = *request.mutable_bucket_ready();
        ready.set_channel(channel());
        ready.set_step(reader_.Number(step_));
        for (std::uint32_t i = reader_.Below(4); i > 0; --i) {
          ready.add_buckets(static_cast<std::uint32_t>(reader_.Number(i - 1)));
        }
        if (reader_.Below(4) == 0) ready.mutable_position()->set_batch(reader_.Number(step_));
        break;
      }
      case 3:
      case 4:
      case 5: {
        auto& end = *request.mutable_end_step();
        end.set_channel(channel());
        end.set_step(reader_.Number(step_));
        end.set_ready_rest(!reader_.Bool());
        if (reader_.Below(4) == 0) end.set_used_map(reader_.Bytes(reader_.Below(3)));
        break;
      }
      case 6:
        request.mutable_abandon_step()->set_channel(channel());
        request.mutable_abandon_step()->set_step(reader_.Number(step_));
        request.mutable_abandon_step()->set_reason("why");
        break;
      case 7:
        request = Layout(reader_.Bool() ? "a" : "b", 1 + reader_.Below(3),
                         reader_.Bool() ? channel() : 0);
        if (reader_.Below(4) == 0) {
          request.mutable_register_layout()->set_buffer_bytes(reader_.Below(100));
        }
        if (reader_.Below(4) == 0) {
          const v1::Parameter first = request.register_layout().parameters(0);
          *request.mutable_layout_part()->add_parameters() = first;
        }
        break;
      case 8:
      case 9:
        request = Mapped(channel());
        break;
      case 10:
        request.mutable_release_layout()->set_channel(channel());
        break;
      case 11:
        request.mutable_barrier()->set_sequence(reader_.Number(sequence_));
        request.mutable_barrier()->set_timeout_ms(reader_.Number(1000));
        break;
      case 12: {
        auto& broadcast = *request.mutable_broadcast();
        broadcast.set_sequence(reader_.Number(sequence_));
        broadcast.set_root(static_cast<std::uint32_t>(reader_.Number(1)));
        broadcast.set_bytes(reader_.Number(6000));
        broadcast.set_timeout_ms(1000);
        break;
      }
      case 13: {
        auto& reduce = *request.mutable_all_reduce();
        reduce.set_sequence(reader_.Number(sequence_));
        reduce.set_count(reader_.Number(16));
        reduce.set_dtype(static_cast<v1::DataType>(1 + reader_.Below(3)));
        reduce.set_op(static_cast<v1::ReduceOp>(1 + reader_.Below(3)));
        reduce.set_timeout_ms(1000);
        break;
      }
      case 14:
        request.mutable_chunk_written()->set_sequence(reader_.Number(sequence_));
        request.mutable_chunk_written()->set_chunk(reader_.Number(0));
        request.mutable_chunk_written()->set_bytes(reader_.Number(2048));
        break;
      case 15:
        request.mutable_chunk_read()->set_sequence(reader_.Number(sequence_));
        request.mutable_chunk_read()->set_chunk(reader_.Number(0));
        break;
      case 16:
        ++sequence_;
        request.mutable_query_step()->set_channel(channel());
        request.mutable_query_step()->set_step(reader_.Number(step_));
        break;
      case 17:
        request.mutable_fetch_state()->set_timeout_ms(reader_.Number(1000));
        break;
      case 18:
        request.mutable_state_offer()->set_transfer(reader_.Number(1));
        request.mutable_state_offer()->set_bytes(reader_.Number(6000));
        break;
      case 19:
        request.mutable_state_written()->set_transfer(reader_.Number(1));
        request.mutable_state_written()->set_chunk(reader_.Number(0));
        break;
      case 20:
        request.mutable_state_read()->set_transfer(reader_.Number(1));
        request.mutable_state_read()->set_chunk(reader_.Number(0));
        break;
      case 21: {
        auto& digests = *request.mutable_state_digests();
        digests.set_transfer(reader_.Number(1));
        digests.set_more(reader_.Below(4) == 0);
        for (std::uint32_t i = reader_.Below(3); i > 0; --i) {
          auto& item = *digests.add_items();
          item.set_name(std::string(1, static_cast<char>('a' + i)));
          item.set_sha256(std::string(32, static_cast<char>(reader_.Below(2))));
        }
        break;
      }
      case 22:
        if (reader_.Bool()) {
          request.mutable_leave()->set_exit(reader_.Bool());
        } else {
          request.mutable_finish();
        }
        break;
      default:
        request.ParseFromString(reader_.Bytes(reader_.Byte()));
    }
    return request;
  }

  fuzz::ByteReader reader_;
  JobOptions options_;
  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ManualExecutor executor_;
  std::shared_ptr<Job> job_;
  std::vector<std::unique_ptr<FuzzedRank>> sessions_;  // all that were ever open
  std::array<FuzzedRank*, kRanks> ranks_{};            // the last session of each
  std::uint64_t incarnations_ = 0;
  std::uint64_t step_ = 1;
  std::uint64_t sequence_ = 1;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
