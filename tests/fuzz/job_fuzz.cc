// A whole job under messages of its ranks that a fuzzer chooses: whole steps, operations, layouts
// that are registered, replaced and released, losses, replacements and their state. One thread runs
// everything: messages, reductions, copies and the clock come in the fuzzer's order.
//
// The session of a rank that breaks the protocol ends, as in the daemon. The sanitizers check every
// access to the ranks' memory. At the end nothing refers to any of it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/error.h"
#include "daemon/job/job.h"
#include "daemon/rpc/rank_dispatch.h"
#include "gradsync/v1/gradsync.pb.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/fuzzed_rank.h"
#include "tests/fuzz/rank_messages.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr int kMaxActions = 400;
constexpr std::uint64_t kMillisecond = 1'000'000;

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
      for (std::uint32_t rank = 0; rank < kRanks; ++rank)
        Take(rank, fuzz::LayoutMessage("a", 3, 0));
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) Take(rank, fuzz::MappedMessage(1));
      if (options_.Holds()) CompleteFirstStep();
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
  // From then on a rank that is lost is held.
  void CompleteFirstStep() {
    v1::SessionRequest request;
    request.mutable_end_step()->set_channel(1);
    request.mutable_end_step()->set_step(1);
    request.mutable_end_step()->set_ready_rest(true);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) Take(rank, request);
    reducer_.CompleteAll();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) Learn(rank);
    FUZZ_CHECK(counts_.step == 2);
  }

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
        // Only with this reason is a rank held.
        Lose(rank,
             MakeError(absl::StatusCode::kAborted, reason::kProcessEnded, "its process has ended"));
        return;
      }
      case 15:
        Join(reader_.Below(kRanks));
        return;
      default: {
        const std::uint32_t rank = reader_.Below(kRanks);
        const std::uint32_t newest = ranks_[rank] == nullptr ? 0 : ranks_[rank]->NewestChannel();
        Take(rank, fuzz::NextMessage(&reader_, newest, &counts_));
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
    limits.staging_bytes = FuzzedRank::kStagingBytes;
    const absl::Status status = TakeRankRequest(request, limits, clock_.NowNs(), ranks_[rank]);
    if (!status.ok()) Lose(rank, status);
    Learn(rank);
  }

  // What a trainer reads in the daemon's messages: without it the fuzzer would have to guess.
  void Learn(std::uint32_t rank) {
    for (const SessionMessage& message : ranks_[rank]->sink()->Take()) {
      if (const auto* done = std::get_if<StepDoneMessage>(&message)) {
        counts_.step = std::max(counts_.step, done->record->times.step + 1);
      }
    }
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
  fuzz::RankCounts counts_;
};

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::daemon::World(gradsync::fuzz::ByteReader(data, size)).Run();
  return 0;
}
