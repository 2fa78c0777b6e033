#include "tools/bench/barrier.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::bench {
namespace {

constexpr std::uint32_t kParties = 4;
constexpr int kRounds = 500;

TEST(BarrierTest, EveryPartyWaitsForAllOthers) {
  Barrier barrier;
  std::vector<int> round_of(kParties, 0);
  std::vector<std::uint32_t> early(kParties, 0);
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < kParties; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int round = 1; round <= kRounds; ++round) {
        round_of[rank] = round;
        barrier.Wait(kParties);
        for (const int other : round_of) early[rank] += other != round;
        barrier.Wait(kParties);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(early, std::vector<std::uint32_t>(kParties, 0));
}

}  // namespace
}  // namespace gradsync::bench
