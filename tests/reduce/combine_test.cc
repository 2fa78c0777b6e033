#include "daemon/reduce/combine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "tests/reduce/half_reference.h"

namespace gradsync::daemon {
namespace {

using Bytes = std::vector<std::byte>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16,
                               DataType::kBfloat16};

// ---- Elements as double, which holds every value of every type exactly ----

double Element(DataType dtype, const std::byte* from) {
  switch (dtype) {
    case DataType::kFloat32: {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    case DataType::kFloat64: {
      double value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    default: {
      std::uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      return dtype == DataType::kFloat16 ? Float16Value(bits) : Bfloat16Value(bits);
    }
  }
}

void SetElement(DataType dtype, double value, std::byte* to) {
  if (dtype == DataType::kFloat64) {
    std::memcpy(to, &value, sizeof(value));
  } else if (dtype == DataType::kFloat32) {
    const float narrow = static_cast<float>(value);
    std::memcpy(to, &narrow, sizeof(narrow));
  } else {
    const float wide = static_cast<float>(value);
    const std::uint16_t bits =
        dtype == DataType::kFloat16 ? NearestFloat16(wide) : NearestBfloat16(wide);
    std::memcpy(to, &bits, sizeof(bits));
  }
}

// The contract of Combine, one element at a time. `volatile` keeps the compiler from contracting or
// reordering the arithmetic.
double CombinedElement(DataType dtype, const std::vector<Bytes>& buffers, std::size_t index,
                       double scale) {
  const std::size_t at = index * ItemSize(dtype);
  if (dtype == DataType::kFloat64) {
    volatile double sum = Element(dtype, &buffers[0][at]);
    for (std::size_t b = 1; b < buffers.size(); ++b) sum = sum + Element(dtype, &buffers[b][at]);
    return sum * scale;
  }
  volatile float sum = static_cast<float>(Element(dtype, &buffers[0][at]));
  for (std::size_t b = 1; b < buffers.size(); ++b) {
    sum = sum + static_cast<float>(Element(dtype, &buffers[b][at]));
  }
  return sum * static_cast<float>(scale);
}

Bytes Reference(DataType dtype, const std::vector<Bytes>& buffers, std::size_t count,
                double scale) {
  Bytes result(buffers[0].size());
  for (std::size_t i = 0; i < count; ++i) {
    SetElement(dtype, CombinedElement(dtype, buffers, i, scale), &result[i * ItemSize(dtype)]);
  }
  return result;
}

// Expects the same bits, or NaN in both.
void ExpectSame(DataType dtype, const Bytes& actual, const Bytes& expected, std::size_t count) {
  const std::size_t item = ItemSize(dtype);
  for (std::size_t i = 0; i < count; ++i) {
    const std::byte* const a = &actual[i * item];
    const std::byte* const e = &expected[i * item];
    if (std::memcmp(a, e, item) == 0) continue;
    if (std::isnan(Element(dtype, a)) && std::isnan(Element(dtype, e))) continue;
    FAIL() << DataTypeName(dtype) << " element " << i << " of " << count << ": "
           << Element(dtype, a) << " instead of " << Element(dtype, e);
  }
}

void CombineAll(DataType dtype, std::vector<Bytes>* buffers, std::size_t first, std::size_t count,
                double scale, GradientStats* stats = nullptr) {
  std::vector<std::byte*> pointers;
  for (Bytes& buffer : *buffers) pointers.push_back(buffer.data() + first * ItemSize(dtype));
  Combine(dtype, pointers, count, scale, stats);
}

// Expects `stats` to describe the content of `result`.
void ExpectStatsOf(DataType dtype, const Bytes& result, std::size_t count,
                   const GradientStats& stats) {
  double sum = 0;
  std::uint64_t non_finite = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = Element(dtype, &result[i * ItemSize(dtype)]);
    sum += value * value;
    non_finite += std::isfinite(value) ? 0 : 1;
  }
  EXPECT_EQ(stats.non_finite, non_finite) << DataTypeName(dtype) << ", " << count << " elements";
  if (!std::isfinite(sum)) {
    EXPECT_EQ(std::isnan(stats.sum_of_squares), std::isnan(sum));
    EXPECT_FALSE(std::isfinite(stats.sum_of_squares));
    return;
  }
  const double relative = dtype == DataType::kFloat64 ? 1e-12 : 1e-5;
  EXPECT_NEAR(stats.sum_of_squares, sum, relative * sum)
      << DataTypeName(dtype) << ", " << count << " elements";
}

// Values whose sums cancel and round, and some of which are subnormal or infinite in a 16-bit type.
std::vector<Bytes> RandomBuffers(DataType dtype, std::size_t buffers, std::size_t count,
                                 std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> mantissa(-2.0, 2.0);
  std::uniform_int_distribution<int> exponent(-26, 16);
  std::vector<Bytes> result(buffers, Bytes(count * ItemSize(dtype)));
  for (Bytes& buffer : result) {
    for (std::size_t i = 0; i < count; ++i) {
      SetElement(dtype, std::ldexp(mantissa(random), exponent(random)),
                 &buffer[i * ItemSize(dtype)]);
    }
  }
  return result;
}

// Runs once for each SIMD target that is compiled in and that this CPU supports.
class CombineTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    ASSERT_STREQ(CombineTarget(), hwy::TargetName(GetParam()));
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

TEST_P(CombineTest, EqualsTheReferenceForAnyCountAndNumberOfBuffers) {
  for (const DataType dtype : kTypes) {
    for (const std::size_t k : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64}) {
      for (const std::size_t count :
           {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1001}) {
        // Each buffer has one element more than is combined. That element must not change.
        const std::vector<Bytes> inputs =
            RandomBuffers(dtype, k, count + 1, static_cast<std::uint32_t>(1000 * k + count));
        const double scale = 1.0 / static_cast<double>(k + 1);
        const Bytes expected = Reference(dtype, inputs, count, scale);
        std::vector<Bytes> buffers = inputs;
        CombineAll(dtype, &buffers, 0, count, scale);
        for (std::size_t b = 0; b < k; ++b) {
          SCOPED_TRACE(testing::Message() << "buffer " << b << " of " << k);
          ExpectSame(dtype, buffers[b], expected, count);
          const std::size_t end = count * ItemSize(dtype);
          EXPECT_EQ(std::memcmp(&buffers[b][end], &inputs[b][end], ItemSize(dtype)), 0);
        }
      }
    }
  }
}

// Long enough for the loop that prefetches cache lines for writing.
TEST_P(CombineTest, EqualsTheReferenceForALargeBuffer) {
  constexpr std::size_t kCount = (5u << 20) / sizeof(float) + 13;
  for (const std::size_t k : {1, 2, 3}) {
    const std::vector<Bytes> inputs = RandomBuffers(DataType::kFloat32, k, kCount, 7);
    std::vector<Bytes> buffers = inputs;
    CombineAll(DataType::kFloat32, &buffers, 0, kCount, 0.25);
    const Bytes expected = Reference(DataType::kFloat32, inputs, kCount, 0.25);
    for (const Bytes& buffer : buffers) EXPECT_TRUE(buffer == expected) << k << " buffers";
  }
}

TEST_P(CombineTest, SlicingDoesNotChangeABit) {
  constexpr std::size_t kCount = 4099;
  std::mt19937 random(3);
  for (const DataType dtype : kTypes) {
    for (const std::size_t k : {2, 5}) {
      const std::vector<Bytes> inputs = RandomBuffers(dtype, k, kCount, 11);
      std::vector<Bytes> whole = inputs;
      CombineAll(dtype, &whole, 0, kCount, 1.0 / 3);
      std::vector<Bytes> sliced = inputs;
      const std::size_t step = 8 / ItemSize(dtype);  // slices begin at multiples of 8 bytes
      for (std::size_t first = 0; first < kCount;) {
        const std::size_t count = std::min(kCount - first, step * (1 + random() % 100));
        CombineAll(dtype, &sliced, first, count, 1.0 / 3);
        first += count;
      }
      EXPECT_TRUE(sliced == whole) << DataTypeName(dtype) << ", " << k << " buffers";
    }
  }
}

TEST_P(CombineTest, SumsInTheOrderOfTheBuffers) {
  constexpr float kBig = 1e8f;
  const auto sum_of = [](std::vector<float> terms) {
    std::vector<Bytes> buffers(terms.size(), Bytes(sizeof(float)));
    for (std::size_t b = 0; b < terms.size(); ++b) {
      SetElement(DataType::kFloat32, terms[b], buffers[b].data());
    }
    CombineAll(DataType::kFloat32, &buffers, 0, 1, 1.0);
    return Element(DataType::kFloat32, buffers.back().data());
  };
  EXPECT_EQ(sum_of({kBig, 1, -kBig}), 0);
  EXPECT_EQ(sum_of({kBig, -kBig, 1}), 1);
  EXPECT_EQ(sum_of({1, kBig, -kBig}), 0);
  EXPECT_EQ(sum_of({kBig, -kBig, 1, kBig, 1, -kBig}), 0);
}

TEST_P(CombineTest, KeepsInfinityNanSubnormalsAndTheSignOfZero) {
  struct Case {
    double a, b, sum;
  };
  for (const DataType dtype : kTypes) {
    const double tiny = dtype == DataType::kFloat64   ? std::numeric_limits<double>::denorm_min()
                        : dtype == DataType::kFloat16 ? std::ldexp(1.0, -24)
                        : dtype == DataType::kFloat32 ? std::ldexp(1.0, -149)
                                                      : std::ldexp(1.0, -133);
    const Case cases[] = {
        {kInfinity, 1, kInfinity},
        {-kInfinity, 1, -kInfinity},
        {kInfinity, -kInfinity, kNan},
        {kNan, 1, kNan},
        {1, kNan, kNan},
        {kNan, kInfinity, kNan},
        {tiny, 0, tiny},
        {tiny, tiny, 2 * tiny},
        {-tiny, -tiny, -2 * tiny},
        {-0.0, -0.0, -0.0},
        {0.0, -0.0, 0.0},
        {3, -3, 0.0},
    };
    // The cases repeat, so that both the loop and the tail process each of them.
    constexpr std::size_t kRepeat = 23;
    std::vector<Bytes> buffers(2, Bytes(std::size(cases) * kRepeat * ItemSize(dtype)));
    Bytes expected(buffers[0].size());
    std::size_t i = 0;
    for (std::size_t r = 0; r < kRepeat; ++r) {
      for (const Case& c : cases) {
        const std::size_t at = i++ * ItemSize(dtype);
        SetElement(dtype, c.a, &buffers[0][at]);
        SetElement(dtype, c.b, &buffers[1][at]);
        SetElement(dtype, c.sum, &expected[at]);
      }
    }
    CombineAll(dtype, &buffers, 0, i, 1.0);
    ExpectSame(dtype, buffers[0], expected, i);
    ExpectSame(dtype, buffers[1], expected, i);
  }
}

TEST_P(CombineTest, OverflowsToInfinity) {
  // 65519 is the largest integer that rounds to 65504, the largest float16.
  std::vector<Bytes> buffers(2, Bytes(2 * 3));
  const double terms[2][3] = {{65504, 65504, -65504}, {8, 16, -16}};
  for (std::size_t b = 0; b < 2; ++b) {
    for (std::size_t i = 0; i < 3; ++i) {
      SetElement(DataType::kFloat16, terms[b][i], &buffers[b][2 * i]);
    }
  }
  CombineAll(DataType::kFloat16, &buffers, 0, 3, 1.0);
  EXPECT_EQ(Element(DataType::kFloat16, &buffers[0][0]), 65504);
  EXPECT_EQ(Element(DataType::kFloat16, &buffers[0][2]), kInfinity);
  EXPECT_EQ(Element(DataType::kFloat16, &buffers[0][4]), -kInfinity);

  // The sum overflows float16. The average does not, because sum and average are computed in
  // float32.
  for (Bytes& buffer : buffers) SetElement(DataType::kFloat16, 60000, buffer.data());
  CombineAll(DataType::kFloat16, &buffers, 0, 1, 0.5);
  EXPECT_EQ(Element(DataType::kFloat16, buffers[0].data()), 60000);
}

// Every 16-bit value, unscaled and scaled: tests widening, rounding and narrowing.
TEST_P(CombineTest, EverySixteenBitValueIsRoundedOnceToNearestEven) {
  constexpr std::size_t kValues = 1 << 16;
  for (const DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
    std::vector<Bytes> inputs(2, Bytes(2 * kValues));
    for (std::size_t i = 0; i < kValues; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(&inputs[0][2 * i], &bits, 2);
      SetElement(dtype, -0.0, &inputs[1][2 * i]);  // x + -0 is x, also if x is 0 or -0
    }
    for (const double scale : {1.0, 1.0 / 3, 0.1, 1.0009765625, 1.5, 0.99999, std::ldexp(1.0, -12),
                               std::ldexp(1.25, -20), 1000.0, std::ldexp(1.0, 30)}) {
      SCOPED_TRACE(scale);
      std::vector<Bytes> buffers = inputs;
      CombineAll(dtype, &buffers, 0, kValues, scale);
      ExpectSame(dtype, buffers[1], Reference(dtype, inputs, kValues, scale), kValues);
      if (scale == 1.0) ExpectSame(dtype, buffers[1], inputs[0], kValues);
    }
  }
}

TEST_P(CombineTest, OneBufferWithoutScaleIsNotTouched) {
  Bytes buffer(8);
  const std::uint32_t signaling_nan = 0x7F800001;
  std::memcpy(&buffer[0], &signaling_nan, 4);
  std::vector<Bytes> buffers = {buffer};
  CombineAll(DataType::kFloat32, &buffers, 0, 2, 1.0);
  EXPECT_TRUE(buffers[0] == buffer);
}

// The counts include less than a vector, about one block that is summed in float32, and a tail.
TEST_P(CombineTest, StatsDescribeTheWrittenResult) {
  for (const DataType dtype : kTypes) {
    for (const std::size_t k : {1, 2, 3, 4, 5}) {
      for (const std::size_t count : {0, 1, 17, 65, 1001, 8192, 10007}) {
        const std::vector<Bytes> inputs =
            RandomBuffers(dtype, k, count + 1, static_cast<std::uint32_t>(100 * k + count));
        for (const double scale : {1.0, 1.0 / 3}) {
          SCOPED_TRACE(testing::Message() << k << " buffers, scale " << scale);
          std::vector<Bytes> plain = inputs;
          CombineAll(dtype, &plain, 0, count, scale);
          std::vector<Bytes> buffers = inputs;
          GradientStats stats = {-1, 7};
          CombineAll(dtype, &buffers, 0, count, scale, &stats);
          for (std::size_t b = 0; b < k; ++b) ExpectSame(dtype, buffers[b], plain[b], count + 1);
          ExpectStatsOf(dtype, buffers.back(), count, stats);
          GradientStats again;
          buffers = inputs;
          CombineAll(dtype, &buffers, 0, count, scale, &again);
          if (!std::isnan(stats.sum_of_squares)) {
            EXPECT_EQ(again.sum_of_squares, stats.sum_of_squares);
          }
        }
      }
    }
  }
}

TEST_P(CombineTest, EveryNonFiniteElementIsCounted) {
  constexpr std::size_t kCount = 20011;
  for (const DataType dtype : kTypes) {
    for (const std::size_t k : {1, 2}) {
      std::vector<Bytes> buffers(k, Bytes(kCount * ItemSize(dtype)));
      std::uint64_t expected = 0;
      for (std::size_t i = 0; i < kCount; ++i) {
        // The first element, some others, the last one, and a range longer than a block.
        const bool bad = i % 1500 == 0 || i + 1 == kCount || (i >= 9000 && i < 18000);
        const double value = !bad ? 1.0 : i % 3 == 0 ? kInfinity : i % 3 == 1 ? -kInfinity : kNan;
        SetElement(dtype, value, &buffers[i % k][i * ItemSize(dtype)]);
        expected += bad ? 1 : 0;
      }
      GradientStats stats;
      CombineAll(dtype, &buffers, 0, kCount, 1.0, &stats);
      EXPECT_EQ(stats.non_finite, expected) << DataTypeName(dtype) << ", " << k << " buffers";
      EXPECT_TRUE(std::isnan(stats.sum_of_squares));
    }
  }
  // With Inf but no NaN among the elements, the norm is Inf.
  std::vector<Bytes> buffers(2, Bytes(4 * 4));
  SetElement(DataType::kFloat32, -kInfinity, &buffers[1][8]);
  GradientStats stats;
  CombineAll(DataType::kFloat32, &buffers, 0, 4, 0.5, &stats);
  EXPECT_EQ(stats.non_finite, 1u);
  EXPECT_EQ(stats.sum_of_squares, kInfinity);
}

// Finite elements have a finite norm, even if float32 cannot hold their squares.
TEST_P(CombineTest, SquaresBeyondFloat32sRangeAreSummed) {
  constexpr std::size_t kCount = 12345;
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat64, DataType::kBfloat16}) {
    for (const double value : {1e30, -1e30, 1e-30, 3e-23, 1e19, 0.0}) {
      for (const std::size_t k : {1, 2}) {
        std::vector<Bytes> buffers(k, Bytes(kCount * ItemSize(dtype)));
        for (std::size_t i = 0; i < kCount; ++i) {
          SetElement(dtype, value, &buffers[i % k][i * ItemSize(dtype)]);
        }
        GradientStats stats;
        CombineAll(dtype, &buffers, 0, kCount, 1.0, &stats);
        EXPECT_EQ(stats.non_finite, 0u) << value;
        ExpectStatsOf(dtype, buffers[0], kCount, stats);
      }
    }
  }
  // At the limit of float64, finite elements can have an infinite square.
  std::vector<Bytes> buffers(2, Bytes(64 * 8));
  SetElement(DataType::kFloat64, 1e200, &buffers[1][16]);
  GradientStats stats;
  CombineAll(DataType::kFloat64, &buffers, 0, 64, 1.0, &stats);
  EXPECT_EQ(stats.non_finite, 0u);
  EXPECT_EQ(stats.sum_of_squares, std::numeric_limits<double>::infinity());
}

// The stats describe the rounded result, as the trainer reads it.
TEST_P(CombineTest, OverflowByRoundingIsCounted) {
  constexpr std::size_t kCount = 3001;
  std::vector<Bytes> buffers(2, Bytes(2 * kCount));
  SetElement(DataType::kFloat16, 65504, &buffers[0][0]);
  SetElement(DataType::kFloat16, 8, &buffers[1][0]);  // 65512 is 65504 again
  SetElement(DataType::kFloat16, 65504, &buffers[0][2 * 100]);
  SetElement(DataType::kFloat16, 16, &buffers[1][2 * 100]);  // 65520 is Inf
  std::vector<Bytes> finite = buffers;
  GradientStats stats;
  CombineAll(DataType::kFloat16, &buffers, 0, kCount, 1.0, &stats);
  EXPECT_EQ(stats.non_finite, 1u);
  EXPECT_EQ(stats.sum_of_squares, kInfinity);

  CombineAll(DataType::kFloat16, &finite, 0, 64, 1.0, &stats);
  EXPECT_EQ(stats.non_finite, 0u);
  EXPECT_NEAR(stats.sum_of_squares, 65504.0 * 65504.0, 1.0);
}

TEST_P(CombineTest, OneBufferWithoutScaleIsMeasuredAndNotTouched) {
  constexpr std::size_t kCount = 20011;
  for (const DataType dtype : kTypes) {
    const std::vector<Bytes> inputs = RandomBuffers(dtype, 1, kCount, 5);
    std::vector<Bytes> buffers = inputs;
    GradientStats stats;
    CombineAll(dtype, &buffers, 0, kCount, 1.0, &stats);
    EXPECT_TRUE(buffers == inputs);
    ExpectStatsOf(dtype, inputs[0], kCount, stats);
  }
}

TEST_P(CombineTest, AResultIsMeasuredAgainBitForBit) {
  for (const DataType dtype : kTypes) {
    for (const std::size_t k : {2, 3, 5}) {
      for (const std::size_t count : {1, 1001, 20011}) {
        std::vector<Bytes> buffers = RandomBuffers(dtype, k, count, 6);
        GradientStats written;
        CombineAll(dtype, &buffers, 0, count, 1.0 / static_cast<double>(k), &written);
        const Bytes result = buffers[0];
        GradientStats again;
        MeasureAgain(dtype, buffers[0].data(), count, &again);
        EXPECT_TRUE(buffers[0] == result) << DataTypeName(dtype);
        EXPECT_EQ(again.non_finite, written.non_finite);
        const bool nan = std::isnan(written.sum_of_squares);
        EXPECT_EQ(std::isnan(again.sum_of_squares), nan);
        if (nan) continue;
        EXPECT_EQ(again.sum_of_squares, written.sum_of_squares) << DataTypeName(dtype);
      }
    }
  }
}

TEST(CombineNothingTest, IsAllowed) {
  Combine(DataType::kFloat32, {}, 5, 1.0);
  std::byte* const null = nullptr;
  GradientStats stats = {5, 5};
  Combine(DataType::kFloat32, {&null, 1}, 0, 0.5, &stats);
  EXPECT_EQ(stats.sum_of_squares, 0);
  EXPECT_EQ(stats.non_finite, 0u);
}

INSTANTIATE_TEST_SUITE_P(Targets, CombineTest,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const testing::TestParamInfo<std::int64_t>& info) {
                           return std::string(hwy::TargetName(info.param));
                         });

// ---- SumInto and ScaleInto ----

TEST(SumIntoTest, SumIntoAndScaleIntoEqualCombine) {
  std::mt19937 random(11);
  std::uniform_real_distribution<double> value(-4, 4);
  for (const DataType dtype : kTypes) {
    const std::size_t item = ItemSize(dtype);
    for (const std::size_t count : {0u, 1u, 7u, 63u, 64u, 1000u, 20011u}) {
      for (const std::size_t ranks : {1u, 2u, 3u, 5u}) {
        std::vector<Bytes> buffers(ranks, Bytes(count * item + 1));
        for (Bytes& buffer : buffers) {
          for (std::size_t i = 0; i < count; ++i) {
            SetElement(dtype, value(random), &buffer[i * item]);
          }
        }
        std::vector<Bytes> combined = buffers;
        GradientStats expected;
        CombineAll(dtype, &combined, 0, count, 1.0 / 3, &expected);
        std::vector<const std::byte*> from;
        std::vector<std::byte*> to;
        for (Bytes& buffer : buffers) {
          from.push_back(buffer.data());
          to.push_back(buffer.data());
        }
        std::vector<double> sum(count + 1);
        auto* const work = reinterpret_cast<std::byte*>(sum.data());
        // In two parts, because chunks arrive one by one.
        const std::size_t wide = item == 2 ? 4 : item;
        const std::size_t half = count / 128 * 64;
        GradientStats stats;
        for (const auto& [first, part] :
             {std::pair(std::size_t{0}, half), std::pair(half, count - half)}) {
          std::vector<const std::byte*> part_from = from;
          std::vector<std::byte*> part_to = to;
          for (const std::byte*& buffer : part_from) buffer += first * item;
          for (std::byte*& buffer : part_to) buffer += first * item;
          SumInto(dtype, part_from, part, work + first * wide);
          GradientStats of_part;
          ScaleInto(dtype, work + first * wide, part, 1.0 / 3, part_to, &of_part);
          stats.sum_of_squares += of_part.sum_of_squares;
          stats.non_finite += of_part.non_finite;
        }
        for (const Bytes& buffer : buffers) EXPECT_EQ(buffer, combined[0]) << DataTypeName(dtype);
        EXPECT_NEAR(stats.sum_of_squares, expected.sum_of_squares, 1e-5 * expected.sum_of_squares);
        EXPECT_EQ(stats.non_finite, 0u);
      }
    }
  }
}

TEST(SumIntoTest, NoBuffersGiveZeros) {
  for (const DataType dtype : kTypes) {
    std::vector<double> sum(10, 1.0);
    SumInto(dtype, {}, 10, reinterpret_cast<std::byte*>(sum.data()));
    EXPECT_EQ(sum[0], 0.0);
    EXPECT_EQ(sum[9], dtype == DataType::kFloat64 ? 0.0 : 1.0);
  }
}

TEST(ScaleIntoTest, CountsNonFiniteElements) {
  const std::vector<float> sum = {1, kInfinity, kNan, 2, 3};
  std::vector<float> to(5);
  std::byte* const out[] = {reinterpret_cast<std::byte*>(to.data())};
  GradientStats stats;
  ScaleInto(DataType::kFloat32, reinterpret_cast<const std::byte*>(sum.data()), 5, 0.5, out,
            &stats);
  EXPECT_EQ(stats.non_finite, 2u);
  EXPECT_EQ(to[3], 1.0f);
}

}  // namespace
}  // namespace gradsync::daemon
