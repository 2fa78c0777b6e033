#include "tools/bench/pattern.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tools/bench/vector_loops.h"

namespace gradsync::bench {
namespace {

// No multiple of any vector, line or period.
constexpr std::size_t kCount = 70'003;

struct alignas(64) Line {
  std::byte bytes[64];
};

// Aligned, with a loop's room after the end.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : lines_(bytes / sizeof(Line) + 32) {}
  std::byte* data() { return lines_.front().bytes; }

 private:
  std::vector<Line> lines_;
};

class PatternTest : public testing::TestWithParam<std::tuple<DataType, std::uint32_t>> {
 protected:
  DataType dtype() const { return std::get<0>(GetParam()); }
  std::uint32_t ranks() const { return std::get<1>(GetParam()); }
  std::size_t item_size() const { return ItemSize(dtype()); }

  std::vector<Buffer> FilledBuffers(const Pattern& pattern, std::uint64_t iteration) const {
    std::vector<Buffer> buffers(ranks(), Buffer(kCount * item_size()));
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
      pattern.Fill(rank, iteration, buffers[rank].data(), kCount);
    }
    return buffers;
  }

  // As the contestants do it: adds rank after rank, then scales.
  Buffer Averaged(const Pattern& pattern, std::uint64_t iteration) const {
    std::vector<Buffer> buffers = FilledBuffers(pattern, iteration);
    std::byte* const sum = buffers[0].data();
    for (std::uint32_t rank = 1; rank < ranks(); ++rank) {
      Add(dtype(), sum, sum, buffers[rank].data(), kCount);
    }
    Scale(dtype(), sum, kCount, 1.0 / ranks());
    return std::move(buffers[0]);
  }
};

// The roofline's loop, both variants.
TEST_P(PatternTest, AverageInPlaceIsExact) {
  const Pattern pattern(dtype(), ranks());
  for (const Prefetch prefetch : {Prefetch::kHardware, Prefetch::kAhead}) {
    for (const std::uint64_t iteration : {0, 1, 61}) {
      std::vector<Buffer> buffers = FilledBuffers(pattern, iteration);
      std::vector<std::byte*> data;
      for (Buffer& buffer : buffers) data.push_back(buffer.data());
      const std::size_t middle = kLoopAlignment * 100;
      AverageInPlace(dtype(), prefetch, data.data(), ranks(), 0, middle);
      AverageInPlace(dtype(), prefetch, data.data(), ranks(), middle, kCount);
      for (const std::byte* rank : data) {
        EXPECT_EQ(pattern.CountWrong(iteration, rank, kCount, true), 0u);
      }
    }
  }
}

TEST_P(PatternTest, SumThenScaleIsExact) {
  const Pattern pattern(dtype(), ranks());
  for (const std::uint64_t iteration : {3, 5}) {
    Buffer average = Averaged(pattern, iteration);
    EXPECT_EQ(pattern.CountWrong(iteration, average.data(), kCount, true), 0u);
  }
}

TEST_P(PatternTest, CountsEveryWrongElementOnce) {
  const Pattern pattern(dtype(), ranks());
  Buffer buffer = Averaged(pattern, 5);
  for (const std::size_t element : {std::size_t{0}, kCount / 2, kCount / 2 + 1, kCount - 1}) {
    buffer.data()[element * item_size()] ^= std::byte{1};
  }
  EXPECT_EQ(pattern.CountWrong(5, buffer.data(), kCount, true), 4u);
}

TEST_P(PatternTest, TheSampleHoldsBothEnds) {
  const Pattern pattern(dtype(), ranks());
  Buffer buffer = Averaged(pattern, 5);
  EXPECT_EQ(pattern.CountWrong(5, buffer.data(), kCount, false), 0u);
  buffer.data()[0] ^= std::byte{1};
  buffer.data()[(kCount - 1) * item_size()] ^= std::byte{1};
  EXPECT_EQ(pattern.CountWrong(5, buffer.data(), kCount, false), 2u);
}

// An all-reduce that does nothing leaves such data in the buffer. None of it passes for an average.
TEST_P(PatternTest, OwnDataOldDataAndShiftedDataAreWrong) {
  const Pattern pattern(dtype(), ranks());
  for (Buffer& own : FilledBuffers(pattern, 5)) {
    EXPECT_GT(pattern.CountWrong(5, own.data(), kCount, true), kCount / 4);
  }
  EXPECT_GT(pattern.CountWrong(5, Averaged(pattern, 4).data(), kCount, true), kCount / 4);
  Buffer average = Averaged(pattern, 5);
  EXPECT_GT(pattern.CountWrong(5, average.data() + 1024 * item_size(), kCount - 1024, true),
            kCount / 4);
}

std::string Name(const testing::TestParamInfo<PatternTest::ParamType>& info) {
  return std::string(DataTypeName(std::get<0>(info.param))) + "_" +
         std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Types, PatternTest,
                         testing::Combine(testing::Values(DataType::kFloat32, DataType::kFloat64,
                                                          DataType::kFloat16, DataType::kBfloat16),
                                          testing::Range(std::uint32_t{2}, std::uint32_t{9})),
                         Name);

}  // namespace
}  // namespace gradsync::bench
