#include "daemon/job/rank_search.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace gradsync::daemon {
namespace {

TEST(RankSearchTest, FindsEachRankThatIsLeft) {
  for (std::uint32_t first = 0; first < 4; ++first) {
    for (std::uint32_t next = 0; next < 4; ++next) {
      RankSearch search;
      EXPECT_TRUE(search.Any(4, [first](std::uint32_t rank) { return rank == first; }));
      EXPECT_TRUE(search.Any(4, [next](std::uint32_t rank) { return rank == next; }))
          << next << " after " << first;
      EXPECT_FALSE(search.Any(4, [](std::uint32_t) { return false; }));
    }
  }
  EXPECT_FALSE(RankSearch().Any(0, [](std::uint32_t) { return true; }));
}

// The order that makes the most looks if each search begins at rank 0.
TEST(RankSearchTest, LooksAtARankAboutTwiceUntilAllHavePassed) {
  constexpr std::uint32_t kRanks = 65'536;
  RankSearch search;
  for (int round = 0; round < 3; ++round) {
    std::vector<bool> passed(kRanks);
    std::uint64_t looks = 0;
    const auto waits = [&](std::uint32_t rank) {
      ++looks;
      return !passed[rank];
    };
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_TRUE(search.Any(kRanks, waits));
      passed[rank] = true;
    }
    EXPECT_FALSE(search.Any(kRanks, waits));
    EXPECT_LE(looks, 3 * std::uint64_t{kRanks});
  }
}

}  // namespace
}  // namespace gradsync::daemon
