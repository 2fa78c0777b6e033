#include "daemon/reduce/combine_order_free.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "hwy/highway.h"
#include "tests/reduce/half_reference.h"

namespace gradsync::daemon {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 15, 31, 33, 63, 64, 65, 127, 129, 1000, 4099};

// ---- The contract, one element at a time ----

template <typename T>
T Get(const Bytes& buffer, std::size_t i) {
  T element;
  std::memcpy(&element, &buffer[i * sizeof(T)], sizeof(T));
  return element;
}

template <typename Int>
std::string ExpectInteger(ReduceOp op, const std::vector<Bytes>& from, const Bytes& result,
                          std::size_t i) {
  using Unsigned = std::make_unsigned_t<Int>;
  Int expected = Get<Int>(from[0], i);
  for (std::size_t b = 1; b < from.size(); ++b) {
    const Int other = Get<Int>(from[b], i);
    if (op == ReduceOp::kMin) {
      expected = std::min(expected, other);
    } else if (op == ReduceOp::kMax) {
      expected = std::max(expected, other);
    } else {
      expected = static_cast<Int>(
          static_cast<Unsigned>(static_cast<Unsigned>(expected) + static_cast<Unsigned>(other)));
    }
  }
  const Int found = Get<Int>(result, i);
  return found == expected
             ? ""
             : "found " + std::to_string(found) + ", expected " + std::to_string(expected);
}

// As double, which holds every value of every type.
double FloatOf(DataType dtype, const Bytes& buffer, std::size_t i) {
  switch (dtype) {
    case DataType::kFloat32:
      return static_cast<double>(Get<float>(buffer, i));
    case DataType::kFloat64:
      return Get<double>(buffer, i);
    case DataType::kFloat16:
      return Float16Value(Get<std::uint16_t>(buffer, i));
    default:
      return Bfloat16Value(Get<std::uint16_t>(buffer, i));
  }
}

std::string ExpectFloat(DataType dtype, ReduceOp op, const std::vector<Bytes>& from,
                        const Bytes& result, std::size_t i) {
  // A zero without a sign is the larger one.
  const auto order = [](double value) { return std::make_tuple(value, !std::signbit(value)); };
  double expected = FloatOf(dtype, from[0], i);
  for (std::size_t b = 1; b < from.size() && !std::isnan(expected); ++b) {
    const double other = FloatOf(dtype, from[b], i);
    const bool wins =
        op == ReduceOp::kMin ? order(other) < order(expected) : order(expected) < order(other);
    if (std::isnan(other) || wins) expected = other;
  }
  const double found = FloatOf(dtype, result, i);
  const bool same = std::isnan(expected)
                        ? std::isnan(found)
                        : found == expected && std::signbit(found) == std::signbit(expected);
  return same ? "" : "found " + std::to_string(found) + ", expected " + std::to_string(expected);
}

std::string Fault(DataType dtype, ReduceOp op, const std::vector<Bytes>& from, const Bytes& result,
                  std::size_t i) {
  switch (dtype) {
    case DataType::kInt8:
      return ExpectInteger<std::int8_t>(op, from, result, i);
    case DataType::kUint8:
      return ExpectInteger<std::uint8_t>(op, from, result, i);
    case DataType::kInt16:
      return ExpectInteger<std::int16_t>(op, from, result, i);
    case DataType::kInt32:
      return ExpectInteger<std::int32_t>(op, from, result, i);
    case DataType::kInt64:
      return ExpectInteger<std::int64_t>(op, from, result, i);
    default:
      return ExpectFloat(dtype, op, from, result, i);
  }
}

// Random bits, so NaN, Inf and sums that wrap around too; and often zeros of both signs, Inf and
// NaN in the same place of several buffers.
std::vector<Bytes> Fill(DataType dtype, std::size_t count, std::size_t buffers) {
  static std::mt19937_64 random(7);
  const std::size_t item = ItemSize(dtype);
  std::vector<Bytes> filled(buffers, Bytes(count * item));
  for (Bytes& buffer : filled) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t bits = random();
      // To integers these are bits like any others.
      const std::uint64_t sign = std::uint64_t{1} << (8 * item - 1);
      const std::uint64_t infinity = dtype == DataType::kFloat16    ? 0x7C00
                                     : dtype == DataType::kBfloat16 ? 0x7F80
                                     : dtype == DataType::kFloat32  ? 0x7F800000
                                                                    : 0x7FF0000000000000;
      switch (i % 8) {
        case 0:
          bits &= sign;
          break;
        case 1:
          bits = (bits & sign) | infinity;
          break;
        case 2:
          if (bits % 4 == 0) bits = (bits & sign) | infinity | 1;  // a NaN in some buffers
          break;
        default:
          break;
      }
      std::memcpy(&buffer[i * item], &bits, item);
    }
  }
  return filled;
}

struct Reduction {
  ReduceOp op;
  DataType dtype;
};

std::vector<Reduction> Reductions() {
  std::vector<Reduction> reductions;
  for (const DataType dtype :
       {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16,
        DataType::kInt8, DataType::kUint8, DataType::kInt16, DataType::kInt32, DataType::kInt64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
      if (IsOrderFree(op, dtype)) reductions.push_back({op, dtype});
    }
  }
  return reductions;
}

class CombineOrderFreeTest : public testing::TestWithParam<std::tuple<Reduction, std::int64_t>> {
 protected:
  CombineOrderFreeTest() {
    hwy::SetSupportedTargetsForTest(std::get<1>(GetParam()));
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~CombineOrderFreeTest() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

  void ExpectCombined(const std::vector<Bytes>& from, const Bytes& result, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(Fault(dtype_, op_, from, result, i), "")
          << "element " << i << " of " << count << ", " << from.size() << " buffers";
    }
  }

  const ReduceOp op_ = std::get<0>(GetParam()).op;
  const DataType dtype_ = std::get<0>(GetParam()).dtype;
};

TEST_P(CombineOrderFreeTest, EveryBufferGetsTheResult) {
  for (const std::size_t buffers : {1, 2, 3, 5}) {
    for (const std::size_t count : kSizes) {
      const std::vector<Bytes> input = Fill(dtype_, count, buffers);
      std::vector<Bytes> output = input;
      std::vector<std::byte*> pointers;
      for (Bytes& buffer : output) pointers.push_back(buffer.data());
      CombineOrderFree(op_, dtype_, pointers, count);
      for (const Bytes& buffer : output) {
        ExpectCombined(input, buffer, count);
        ASSERT_EQ(buffer, output[0]);
      }
    }
  }
}

TEST_P(CombineOrderFreeTest, TakesTheBuffersInAnyOrderIntoOneOfThem) {
  for (const std::size_t buffers : {1, 2, 4}) {
    for (const std::size_t count : kSizes) {
      const std::vector<Bytes> input = Fill(dtype_, count, buffers);
      std::vector<Bytes> memory = input;
      std::vector<const std::byte*> from;
      for (std::size_t b = buffers; b-- > 0;) from.push_back(memory[b].data());
      std::byte* const to = memory.back().data();
      CombineOrderFree(op_, dtype_, from, count, {&to, 1});
      ExpectCombined(input, memory.back(), count);
      for (std::size_t b = 0; b + 1 < buffers; ++b) ASSERT_EQ(memory[b], input[b]);
    }
  }
}

TEST_P(CombineOrderFreeTest, NoBuffersMakeWhatChangesNoResult) {
  constexpr std::size_t kCount = 200;
  std::vector<Bytes> input = Fill(dtype_, kCount, 2);
  const Bytes other = input[0];
  std::byte* to = input[1].data();
  CombineOrderFree(op_, dtype_, absl::Span<const std::byte* const>(), kCount, {&to, 1});
  Bytes result(other.size());
  const std::byte* const from[] = {other.data(), to};
  to = result.data();
  CombineOrderFree(op_, dtype_, from, kCount, {&to, 1});
  ExpectCombined({other}, result, kCount);
}

TEST_P(CombineOrderFreeTest, WritesNothingBehindTheElements) {
  for (const std::size_t count : {1, 13, 70}) {
    std::vector<Bytes> buffers = Fill(dtype_, count + 8, 2);
    const std::vector<Bytes> input = buffers;
    std::byte* const pointers[] = {buffers[0].data(), buffers[1].data()};
    CombineOrderFree(op_, dtype_, pointers, count);
    for (int b : {0, 1}) {
      const auto tail = static_cast<std::ptrdiff_t>(count * ItemSize(dtype_));
      EXPECT_TRUE(std::equal(buffers[b].begin() + tail, buffers[b].end(), input[b].begin() + tail));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CombineOrderFreeTest,
                         testing::Combine(testing::ValuesIn(Reductions()),
                                          testing::ValuesIn(hwy::SupportedAndGeneratedTargets())),
                         [](const auto& info) {
                           const Reduction& reduction = std::get<0>(info.param);
                           return std::string(ReduceOpName(reduction.op)) + "_" +
                                  DataTypeName(reduction.dtype) + "_" +
                                  hwy::TargetName(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace gradsync::daemon
