#include <sched.h>

#include <cstddef>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tools/bench/contestant.h"
#include "tools/bench/pattern.h"
#include "tools/bench/roofline_threads.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {
namespace {

// Bytes from one rank's buffer to the next in the shared memory: whole pages, and room for the loop
// to run over the end.
std::size_t Stride(std::size_t bytes) { return (bytes + 4096 + 4095) / 4096 * 4096; }

class RooflineContestant final : public Contestant {
 public:
  explicit RooflineContestant(const ContestantOptions& options)
      : options_(options), pattern_(options.dtype, options.ranks) {
    if (options.rank == 0) threads_ = std::make_unique<RooflineThreads>(options.threads);
  }

  absl::Status SetUp(std::size_t bytes) override {
    absl::StatusOr<SharedRegion> memory =
        SharedRegion::Open(options_.memory, options_.ranks * Stride(bytes));
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    buffers_.clear();
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
      buffers_.push_back(memory_.data() + rank * Stride(bytes));
    }
    count_ = bytes / ItemSize(options_.dtype);
    ChoosePrefetch();
    return absl::OkStatus();
  }

  std::byte* buffer() override { return buffers_[options_.rank]; }

  absl::Status AllReduce(Turn* turn) override {
    turn->cpu_ns = 0;
    if (threads_ == nullptr) return absl::OkStatus();
    // The other ranks would compete with the threads until they sleep.
    while (!options_.barrier->OthersWait(options_.ranks)) sched_yield();
    const RooflineThreads::Result result = Average();
    turn->own_ns = result.time_ns;
    turn->cpu_ns = result.cpu_ns;
    return absl::OkStatus();
  }

  absl::Status TearDown() override {
    memory_ = SharedRegion();
    return absl::OkStatus();
  }

 private:
  RooflineThreads::Result Average() {
    return threads_->Average(options_.dtype, prefetch_, buffers_, count_);
  }

  // Tries the variants of the loop on buffers of this size, rewritten as in every turn, and keeps
  // the fastest.
  void ChoosePrefetch() {
    // The first round touches everything for the first time; the best of the others decides.
    constexpr int kRounds = 4;
    std::int64_t best_ns = std::numeric_limits<std::int64_t>::max();
    Prefetch best = Prefetch::kHardware;
    for (int round = 0; round < kRounds; ++round) {
      for (const Prefetch prefetch : {Prefetch::kHardware, Prefetch::kAhead}) {
        pattern_.Fill(options_.rank, 0, buffer(), count_);
        options_.barrier->Wait(options_.ranks);
        prefetch_ = prefetch;
        const std::int64_t time_ns = threads_ == nullptr ? 0 : Average().time_ns;
        options_.barrier->Wait(options_.ranks);
        if (round == 0 || time_ns >= best_ns) continue;
        best_ns = time_ns;
        best = prefetch;
      }
    }
    prefetch_ = best;
  }

  const ContestantOptions options_;
  const Pattern pattern_;
  std::unique_ptr<RooflineThreads> threads_;  // of rank 0
  SharedRegion memory_;
  std::vector<std::byte*> buffers_;
  std::size_t count_ = 0;
  Prefetch prefetch_ = Prefetch::kHardware;
};

}  // namespace

std::unique_ptr<Contestant> MakeRooflineContestant(const ContestantOptions& options) {
  return std::make_unique<RooflineContestant>(options);
}

}  // namespace gradsync::bench
