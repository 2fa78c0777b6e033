#include "daemon/base/growing_pause.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;

// How long it lasts from `now_ns` on, in whole seconds.
std::uint64_t SecondsLeft(const GrowingPause& pause, std::uint64_t now_ns) {
  std::uint64_t seconds = 0;
  while (pause.Lasts(now_ns + seconds * kSecondNs)) ++seconds;
  return seconds;
}

TEST(GrowingPauseTest, NobodyWaitsAtFirst) {
  const GrowingPause pause;
  EXPECT_FALSE(pause.Lasts(0));
  EXPECT_TRUE(pause.IsForgiven(0));
}

TEST(GrowingPauseTest, DoublesUpToTheLongest) {
  GrowingPause pause;
  std::uint64_t now_ns = kSecondNs;
  std::vector<std::uint64_t> seconds;
  for (int i = 0; i < 7; ++i) {
    pause.Extend(now_ns);
    seconds.push_back(SecondsLeft(pause, now_ns));
    now_ns += seconds.back() * kSecondNs;
    EXPECT_FALSE(pause.IsForgiven(now_ns));
  }
  EXPECT_EQ(seconds, (std::vector<std::uint64_t>{1, 2, 4, 8, 16, 32, 32}));
}

TEST(GrowingPauseTest, HarmMeanwhileDoesNotDouble) {
  GrowingPause pause;
  pause.Extend(kSecondNs);
  pause.Extend(kSecondNs + kSecondNs / 2);
  EXPECT_TRUE(pause.Lasts(2 * kSecondNs)) << "it waits for another second";
  EXPECT_FALSE(pause.Lasts(2 * kSecondNs + kSecondNs / 2));
  pause.Extend(3 * kSecondNs);
  EXPECT_EQ(SecondsLeft(pause, 3 * kSecondNs), 2u);
}

TEST(GrowingPauseTest, IsForgivenInTime) {
  GrowingPause pause;
  pause.Extend(kSecondNs);
  pause.Extend(2 * kSecondNs);
  const std::uint64_t forgiven_ns = 4 * kSecondNs + GrowingPause::kForgivenNs;
  EXPECT_FALSE(pause.IsForgiven(forgiven_ns - 1));
  EXPECT_TRUE(pause.IsForgiven(forgiven_ns));
  pause.Extend(forgiven_ns);
  EXPECT_EQ(SecondsLeft(pause, forgiven_ns), 1u);
}

}  // namespace
}  // namespace gradsync::daemon
