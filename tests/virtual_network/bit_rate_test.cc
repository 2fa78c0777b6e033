#include "tools/virtual_network/bit_rate.h"

#include "gtest/gtest.h"

namespace gradsync {
namespace {

TEST(BitRate, ReadsWhatTcWrites) {
  EXPECT_EQ(ParseBitRate("1gbit"), 1'000'000'000u);
  EXPECT_EQ(ParseBitRate("2500mbit"), 2'500'000'000u);
  EXPECT_EQ(ParseBitRate("64kbit"), 64'000u);
  EXPECT_EQ(ParseBitRate("9600bit"), 9'600u);
}

TEST(BitRate, RefusesEverythingElse) {
  for (const char* text : {"", "1", "gbit", "0mbit", "-1mbit", "1.5gbit", " 1gbit", "1 gbit",
                           "1gbps", "1Gbit", "99999999999999gbit", "18446744073709551616bit"}) {
    EXPECT_EQ(ParseBitRate(text), std::nullopt) << text;
  }
}

TEST(BitRate, WritesTheShortestText) {
  for (const char* text : {"1gbit", "2500mbit", "64kbit", "9601bit"}) {
    EXPECT_EQ(FormatBitRate(*ParseBitRate(text)), text);
  }
  EXPECT_EQ(FormatBitRate(*ParseBitRate("1000mbit")), "1gbit");
}

}  // namespace
}  // namespace gradsync
