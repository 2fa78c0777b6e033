// The roofline in a contest: rank processes that rewrite their buffers as every other
// implementation's do, and threads that average the same memory in place.

#ifndef TOOLS_BENCH_ROOFLINE_CONTENDER_H_
#define TOOLS_BENCH_ROOFLINE_CONTENDER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tools/bench/contender.h"
#include "tools/bench/roofline_threads.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {

class RooflineContender final : public Contender {
 public:
  RooflineContender(std::unique_ptr<RankTeam> team, DataType dtype, std::uint32_t threads)
      : Contender(std::move(team), nullptr), dtype_(dtype), threads_(threads) {}

  // Tries the variants of the loop on buffers of this size and keeps the fastest.
  absl::Status SetUp(std::uint64_t bytes) override;
  absl::Status TearDown() override;

 protected:
  absl::StatusOr<Turn> Reduce(std::uint64_t iteration) override;

 private:
  absl::Status ChoosePrefetch();

  const DataType dtype_;
  RooflineThreads threads_;
  SharedRegion memory_;
  std::vector<std::byte*> buffers_;
  std::size_t count_ = 0;
  Prefetch prefetch_ = Prefetch::kHardware;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ROOFLINE_CONTENDER_H_
