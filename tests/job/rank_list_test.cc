#include "daemon/job/rank_list.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace gradsync::daemon {
namespace {

TEST(RankListTest, NamesAFewAndCountsTheOthers) {
  RankList ranks;
  EXPECT_TRUE(ranks.empty());
  EXPECT_EQ(ranks.First(), "");
  EXPECT_EQ(ranks.Text(), "");
  ranks.Add(3);
  EXPECT_EQ(ranks.Text(), "3");
  for (std::uint32_t rank = 4; rank < 11; ++rank) ranks.Add(rank);
  EXPECT_EQ(ranks.Text(), "3, 4, 5, 6, 7, 8, 9, 10");
  ranks.Add(11);
  EXPECT_EQ(ranks.Text(), "3, 4, 5, 6, 7, 8, 9, 10, 1 more");
  for (std::uint32_t rank = 12; rank < 65536; ++rank) ranks.Add(rank);
  EXPECT_EQ(ranks.Text(), "3, 4, 5, 6, 7, 8, 9, 10, 65525 more");
  EXPECT_EQ(ranks.First(), "3");
  EXPECT_EQ(ranks.count(), 65533u);
}

TEST(RankListTest, NamesRanksAsAsked) {
  const RankList ranks({1, 2});
  EXPECT_EQ(ranks.Text([](std::uint32_t rank) { return "r" + std::to_string(rank); }), "r1, r2");
}

}  // namespace
}  // namespace gradsync::daemon
