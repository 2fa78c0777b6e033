#include "daemon/engine/wire_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/engine/engine_bucket.h"

namespace gradsync::daemon {
namespace {

constexpr DataType kHalves[] = {DataType::kFloat16, DataType::kBfloat16};

float FloatOf(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::vector<float> ThereAndBack(DataType wire, const std::vector<float>& values) {
  std::vector<std::uint16_t> halves(values.size());
  std::vector<float> back(values.size());
  Narrow(wire, values.data(), values.size(), reinterpret_cast<std::byte*>(halves.data()));
  Widen(wire, reinterpret_cast<const std::byte*>(halves.data()), halves.size(), back.data());
  return back;
}

TEST(WireFormat, EverySixteenBitValueSurvivesTheRoundTrip) {
  for (const DataType wire : kHalves) {
    std::vector<std::uint16_t> halves(65536), back(65536);
    std::vector<float> values(65536);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    Widen(wire, reinterpret_cast<const std::byte*>(halves.data()), halves.size(), values.data());
    Narrow(wire, values.data(), values.size(), reinterpret_cast<std::byte*>(back.data()));
    for (std::size_t i = 0; i < halves.size(); ++i) {
      if (std::isnan(values[i])) {
        ASSERT_EQ(back[i] & 0x8000, halves[i] & 0x8000);
        float again = 0;
        Widen(wire, reinterpret_cast<const std::byte*>(&back[i]), 1, &again);
        ASSERT_TRUE(std::isnan(again)) << i;
      } else {
        ASSERT_EQ(back[i], halves[i]);
      }
    }
  }
}

TEST(WireFormat, WidensByTheDefinition) {
  for (std::uint32_t i = 0; i < 0x7C00; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    float value = 0;
    Widen(DataType::kFloat16, reinterpret_cast<const std::byte*>(&bits), 1, &value);
    const int exponent = static_cast<int>(i >> 10);
    const int mantissa = static_cast<int>(i & 0x3FF);
    const double expected =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(static_cast<double>(value), expected) << i;
  }
  const std::uint16_t infinity = 0xFC00;
  float value = 0;
  Widen(DataType::kFloat16, reinterpret_cast<const std::byte*>(&infinity), 1, &value);
  EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
}

TEST(WireFormat, RoundsToNearestEven) {
  for (const DataType wire : kHalves) {
    std::vector<float> values;
    // Every pattern of the upper bits, combined with lower bits around each tie.
    for (std::uint64_t high = 0; high < 0x10000; high += 3) {
      for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x2000u, 0x3000u,
                                      0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
        const float value = FloatOf(static_cast<std::uint32_t>(high << 16) | low);
        if (std::isfinite(value)) values.push_back(value);
      }
    }
    const std::vector<float> back = ThereAndBack(wire, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = static_cast<double>(values[i]);
      ASSERT_EQ(static_cast<double>(back[i]), Rounded(wire, value))
          << DataTypeName(wire) << " " << value;
    }
  }
}

TEST(WireFormat, NanStaysNan) {
  for (const DataType wire : kHalves) {
    std::vector<float> values;
    for (const std::uint32_t bits :
         {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7F808000u}) {
      values.push_back(FloatOf(bits));
    }
    for (const float back : ThereAndBack(wire, values)) EXPECT_TRUE(std::isnan(back));
  }
}

TEST(WireFormat, SumsInOrderIntoOneOfTheShards) {
  for (const DataType wire :
       {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
    for (const std::size_t shards : {1, 2, 3, 5}) {
      for (const std::size_t count : {0, 1, 7, 64, 1023, 1024, 1025, 5000}) {
        const std::size_t item = ItemSize(wire);
        std::vector<std::vector<std::byte>> memory(shards, std::vector<std::byte>(count * item));
        std::vector<const std::byte*> pointers;
        for (std::size_t s = 0; s < shards; ++s) {
          for (std::size_t i = 0; i < count; ++i) {
            const double value = TestValue(static_cast<std::uint32_t>(s), i, item == 2);
            const auto single = static_cast<float>(value);
            if (item == 2) Narrow(wire, &single, 1, memory[s].data() + 2 * i);
            if (item == 4) std::memcpy(memory[s].data() + 4 * i, &single, 4);
            if (item == 8) std::memcpy(memory[s].data() + 8 * i, &value, 8);
          }
          pointers.push_back(memory[s].data());
        }
        const std::size_t last = shards - 1;
        SumShards(wire, pointers, count, memory[last].data());
        for (std::size_t i = 0; i < count; ++i) {
          float single = 0;
          double value = 0;
          if (item == 2) Widen(wire, memory[last].data() + 2 * i, 1, &single);
          if (item == 4) std::memcpy(&single, memory[last].data() + 4 * i, 4);
          if (item == 8) std::memcpy(&value, memory[last].data() + 8 * i, 8);
          if (item != 8) value = static_cast<double>(single);
          ASSERT_EQ(value, ExpectedSum(wire, wire, static_cast<std::uint32_t>(shards), i))
              << DataTypeName(wire) << " " << i;
        }
      }
    }
  }
}

TEST(WireFormat, OnlyFloat32IsNarrowed) {
  EXPECT_EQ(WireDataType(DataType::kFloat32, WireType::kSame), DataType::kFloat32);
  EXPECT_EQ(WireDataType(DataType::kFloat32, WireType::kBfloat16), DataType::kBfloat16);
  EXPECT_EQ(WireDataType(DataType::kFloat32, WireType::kFloat16), DataType::kFloat16);
  EXPECT_EQ(WireDataType(DataType::kFloat64, WireType::kFloat16), DataType::kFloat64);
  EXPECT_EQ(WireDataType(DataType::kBfloat16, WireType::kSame), DataType::kBfloat16);
  EXPECT_EQ(WireDataType(DataType::kBfloat16, WireType::kFloat16), DataType::kBfloat16);
}

}  // namespace
}  // namespace gradsync::daemon
