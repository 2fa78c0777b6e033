// Random schedules of a job with policy `hold`: ranks die at any moment and come back, every step
// completes with every rank's gradients, and the ranks keep the same state.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <iostream>
#include <string>

#include "tests/job/hold_world.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSchedules = 4000;
// In each phase, over all schedules.
constexpr int kLeastDeaths = 100;

class HoldModelTest : public testing::TestWithParam<HoldWorldOptions> {};

TEST_P(HoldModelTest, EveryStepCompletesWithEveryRank) {
  std::array<int, kDeathPhases> deaths{};
  for (std::uint64_t seed = 0; seed < kSchedules; ++seed) {
    HoldWorld world(GetParam(), seed, &deaths);
    const std::string violation = world.Run();
    ASSERT_TRUE(violation.empty()) << "seed " << seed << ": " << violation;
  }
  for (int phase = 0; phase < kDeathPhases; ++phase) {
    const int count = deaths[static_cast<std::size_t>(phase)];
    EXPECT_GE(count, kLeastDeaths) << NameOf(DeathPhase(phase));
    std::cout << count << " deaths " << NameOf(DeathPhase(phase)) << "\n";
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, HoldModelTest,
                         testing::Values(HoldWorldOptions{2, 3, 2}, HoldWorldOptions{3, 3, 3},
                                         HoldWorldOptions{4, 2, 6}),
                         [](const auto& info) {
                           return std::to_string(info.param.ranks) + "Ranks" +
                                  std::to_string(info.param.deaths) + "Deaths";
                         });

}  // namespace
}  // namespace gradsync::daemon
