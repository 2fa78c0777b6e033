#include "tools/bench/roofline_threads.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tools/bench/pattern.h"

namespace gradsync::bench {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

TEST(RooflineThreadsTest, SharesCoverEveryElement) {
  constexpr std::uint32_t kRanks = 3;
  const Pattern pattern(DataType::kFloat32, kRanks);
  for (const std::uint32_t threads : {1u, 2u, 5u}) {
    RooflineThreads roofline(threads);
    std::uint64_t iteration = 0;
    for (const std::size_t count : {1u, 127u, 128u, 129u, 1000u, 65'537u}) {
      std::vector<std::vector<Line>> memory(kRanks,
                                            std::vector<Line>((count + kLoopAlignment) / 16 + 1));
      std::vector<std::byte*> buffers;
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
        buffers.push_back(memory[rank].front().bytes);
        pattern.Fill(rank, iteration, buffers[rank], count);
      }
      EXPECT_GE(roofline.Average(DataType::kFloat32, Prefetch::kAhead, buffers, count).time_ns, 0);
      for (const std::byte* buffer : buffers) {
        EXPECT_EQ(pattern.CountWrong(iteration, buffer, count, true), 0u) << count;
      }
      ++iteration;
    }
  }
}

}  // namespace
}  // namespace gradsync::bench
