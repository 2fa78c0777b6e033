#include "tools/bench/roofline_contender.h"

#include <cstring>
#include <limits>
#include <string>

#include "tools/bench/roofline_peer.h"

namespace gradsync::bench {

absl::Status RooflineContender::SetUp(std::uint64_t bytes) {
  absl::StatusOr<SharedRegion> memory =
      SharedRegion::Create(team().ranks() * RooflineStride(bytes));
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  buffers_.clear();
  for (std::uint32_t rank = 0; rank < team().ranks(); ++rank) {
    buffers_.push_back(memory_.data() + rank * RooflineStride(bytes));
  }
  count_ = bytes / ItemSize(dtype_);
  Order order = {};
  order.phase = Phase::kSetUp;
  order.bytes = bytes;
  std::strncpy(order.memory_path, memory_.path().c_str(), sizeof(order.memory_path) - 1);
  absl::Status status = team().Do(order);
  if (!status.ok()) return status;
  return ChoosePrefetch();
}

absl::Status RooflineContender::ChoosePrefetch() {
  // The first round touches everything for the first time; the best of the others decides.
  constexpr int kRounds = 4;
  std::int64_t best_ns = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    for (const Prefetch prefetch : {Prefetch::kHardware, Prefetch::kAhead}) {
      absl::Status status = team().Do(Phase::kFill);
      if (!status.ok()) return status;
      const std::int64_t time_ns = threads_.Average(dtype_, prefetch, buffers_, count_).time_ns;
      status = team().Do(Phase::kCheck);
      if (!status.ok()) return status;
      if (round == 0 || time_ns >= best_ns) continue;
      best_ns = time_ns;
      prefetch_ = prefetch;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Turn> RooflineContender::Reduce(std::uint64_t) {
  const RooflineThreads::Result result = threads_.Average(dtype_, prefetch_, buffers_, count_);
  Turn turn;
  turn.time_ns = result.time_ns;
  turn.cpu_ns = result.cpu_ns;
  return turn;
}

absl::Status RooflineContender::TearDown() {
  absl::Status status = Contender::TearDown();
  memory_ = SharedRegion();
  return status;
}

}  // namespace gradsync::bench
