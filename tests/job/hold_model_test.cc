// Random schedules of a job with policy `hold`: ranks die at any moment and come back, every step
// completes with every rank's gradients, and the ranks keep the same state. In some worlds they
// also call barriers, which go on without a lost rank.

#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <string>

#include "tests/job/hold_world.h"

namespace gradsync::daemon {
namespace {

std::string Describe(const HoldWorldOptions& world) {
  const bool survivor = world.source == StateSource::kSurvivor;
  return std::to_string(world.ranks) + "Ranks" + std::to_string(world.faults.deaths) + "Deaths" +
         (survivor ? "Survivor" : "Trainer") + (world.barriers > 0 ? "Barriers" : "") +
         (world.barrier_place == BarrierPlace::kAfterEnd ? "BarrierAfterEnd" : "") +
         (world.barrier_place == BarrierPlace::kAfterVerdict ? "BarrierAfterVerdict" : "");
}

}  // namespace

// For messages of failed tests.
void PrintTo(const HoldWorldOptions& world, std::ostream* out) { *out << Describe(world); }

namespace {

// A schedule takes a millisecond, and many times that with AddressSanitizer.
#ifdef __SANITIZE_ADDRESS__
constexpr int kSchedules = 625;
#else
constexpr int kSchedules = 2500;
#endif
// In each phase, over all schedules.
constexpr int kLeastDeaths = kSchedules / 40;

class HoldModelTest : public testing::TestWithParam<HoldWorldOptions> {};

TEST_P(HoldModelTest, EveryStepCompletesWithEveryRank) {
  Deaths deaths{};
  HoldWorld::SpareMemory spare;
  for (int seed = 0; seed < kSchedules; ++seed) {
    HoldWorld world(GetParam(), static_cast<std::uint64_t>(seed), &deaths, &spare);
    const std::string violation = world.Run();
    ASSERT_TRUE(violation.empty()) << "seed " << seed << ": " << violation;
  }
  for (int phase = 0; phase < kDeathPhases; ++phase) {
    const int count = deaths[static_cast<std::size_t>(phase)];
    if (!Possible(DeathPhase(phase), GetParam())) continue;
    EXPECT_GE(count, kLeastDeaths) << NameOf(DeathPhase(phase));
    std::cout << count << " deaths " << NameOf(DeathPhase(phase)) << "\n";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, HoldModelTest,
    testing::Values(
        HoldWorldOptions{2, 3, StateSource::kTrainer, true, {2, 0, 0, 0, 0, 0, 0}},
        HoldWorldOptions{3, 3, StateSource::kTrainer, false, {3, 1, 0, 0, 0, 0, 0}},
        HoldWorldOptions{2, 3, StateSource::kSurvivor, false, {3, 0, 0, 0, 0, 0, 0}},
        HoldWorldOptions{3, 3, StateSource::kSurvivor, true, {4, 1, 1, 1, 1, 1, 1}},
        HoldWorldOptions{3, 2, StateSource::kSurvivor, false, {1, 2, 2, 2, 1, 1, 2}},
        HoldWorldOptions{4, 2, StateSource::kSurvivor, false, {6, 1, 1, 1, 1, 1, 1}},
        HoldWorldOptions{3, 3, StateSource::kTrainer, false, {3, 0, 0, 0, 0, 0, 0}, 4},
        HoldWorldOptions{3, 3, StateSource::kSurvivor, false, {4, 0, 0, 0, 0, 0, 0}, 4},
        HoldWorldOptions{
            3, 3, StateSource::kTrainer, false, {3, 0, 0, 0, 0, 0, 0}, 0, BarrierPlace::kAfterEnd},
        HoldWorldOptions{
            4, 3, StateSource::kTrainer, false, {4, 0, 0, 0, 0, 0, 0}, 0, BarrierPlace::kAfterEnd},
        HoldWorldOptions{3,
                         3,
                         StateSource::kSurvivor,
                         false,
                         {4, 0, 0, 0, 0, 0, 0},
                         0,
                         BarrierPlace::kAfterVerdict}),
    [](const auto& info) { return Describe(info.param); });

}  // namespace

}  // namespace gradsync::daemon
