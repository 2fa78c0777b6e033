#include "tools/gradsyncctl/quantity.h"

#include "gtest/gtest.h"

namespace gradsync {
namespace {

TEST(QuantityTest, MicrosecondsTakeTheUnitThatFits) {
  EXPECT_EQ(FormatMicroseconds(0), "0 us");
  EXPECT_EQ(FormatMicroseconds(0.25), "0.25 us");
  EXPECT_EQ(FormatMicroseconds(12.34), "12.3 us");
  EXPECT_EQ(FormatMicroseconds(999.4), "999 us");
  EXPECT_EQ(FormatMicroseconds(999.6), "1.00 ms");
  EXPECT_EQ(FormatMicroseconds(9'996), "10.0 ms");
  EXPECT_EQ(FormatMicroseconds(999'600), "1.00 s");
  EXPECT_EQ(FormatMicroseconds(90e6), "90.0 s");
  EXPECT_EQ(FormatMicroseconds(3600e6), "60.0 min");
}

TEST(QuantityTest, UptimeHasAtMostTwoUnits) {
  EXPECT_EQ(FormatUptime(-1), "0 s");
  EXPECT_EQ(FormatUptime(59.9), "59 s");
  EXPECT_EQ(FormatUptime(785), "13 min 5 s");
  EXPECT_EQ(FormatUptime(2 * 3600 + 13 * 60 + 5), "2 h 13 min");
  EXPECT_EQ(FormatUptime(5 * 86'400 + 2 * 3600), "5 d 2 h");
}

TEST(QuantityTest, BytesAreBinary) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(25u << 20), "25.0 MiB");
  EXPECT_EQ(FormatBytes((1u << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(~std::uint64_t{0}), "16.0 EiB");
}

TEST(QuantityTest, RanksAreRanges) {
  EXPECT_EQ(FormatRanks({}), "-");
  EXPECT_EQ(FormatRanks({3}), "3");
  EXPECT_EQ(FormatRanks({0, 1}), "0-1");
  EXPECT_EQ(FormatRanks({0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
}

TEST(QuantityTest, LowestRanksSayHowManyMoreThereAre) {
  EXPECT_EQ(FormatLowestRanks({}, 0, 8), "-");
  EXPECT_EQ(FormatLowestRanks({1, 2, 3}, 3, 8), "1-3");
  EXPECT_EQ(FormatLowestRanks({1, 2, 3}, 65'535, 8), "1-3, 65532 more");
  EXPECT_EQ(FormatLowestRanks({0, 2, 4, 5, 7}, 5, 3), "0, 2, 4-5, 1 more");
  EXPECT_EQ(FormatLowestRanks({0, 2, 4, 5, 7}, 9, 2), "0, 2, 7 more");
}

}  // namespace
}  // namespace gradsync
