#include "tools/bench/gate.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace gradsync::bench {
namespace {

constexpr std::uint32_t kParties = 4;
constexpr int kRounds = 500;

// The conductor and its ranks, as threads: orders out, arrivals back.
TEST(GateTest, EveryOrderReachesEveryRankOnce) {
  Signal orders;
  Arrivals arrivals;
  int order = 0;  // ordered by the gates alone, as ThreadSanitizer checks
  std::vector<int> obeyed(kParties, 0);
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < kParties; ++rank) {
    ranks.emplace_back([&, rank] {
      std::uint32_t seen = 0;
      for (int round = 0; round < kRounds; ++round) {
        seen = orders.WaitPast(seen);
        obeyed[rank] += order;
        arrivals.Arrive(kParties);
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    order = round;
    arrivals.Reset();
    orders.Post();
    while (!arrivals.Wait(kParties, absl::Minutes(1))) {
    }
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(obeyed, std::vector<int>(kParties, kRounds * (kRounds - 1) / 2));
}

TEST(GateTest, NobodyPassesABarrierAlone) {
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

TEST(GateTest, WaitingForArrivalsTimesOut) {
  Arrivals arrivals;
  arrivals.Arrive(2);
  EXPECT_FALSE(arrivals.Wait(2, absl::Milliseconds(1)));
  arrivals.Arrive(2);
  EXPECT_TRUE(arrivals.Wait(2, absl::ZeroDuration()));
}

}  // namespace
}  // namespace gradsync::bench
