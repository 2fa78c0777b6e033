#include "daemon/base/ticker.h"

#include <atomic>
#include <chrono>

#include "gtest/gtest.h"
#include "tests/engine/event.h"

namespace gradsync::daemon {
namespace {

constexpr std::chrono::milliseconds kPeriod{1};

TEST(TickerTest, SleepsUntilItIsWoken) {
  Event ticked;
  Ticker ticker(kPeriod, [&] {
    ticked.Set();
    return false;
  });
  EXPECT_FALSE(ticked.Wait(50 * kPeriod).has_value());
  ticker.Wake();
  EXPECT_TRUE(ticked.Wait().has_value());
}

TEST(TickerTest, TicksAsLongAsThereIsWork) {
  Event third;
  int ticks = 0;  // only the ticker's thread uses it
  Ticker ticker(kPeriod, [&] {
    if (++ticks == 3) third.Set();
    return ticks < 3;
  });
  ticker.Wake();
  EXPECT_TRUE(third.Wait().has_value());
  ticker.Stop();
  EXPECT_EQ(ticks, 3);
}

// However often it is woken.
TEST(TickerTest, TicksOnceInAPeriod) {
  constexpr auto kLongPeriod = 20 * kPeriod;
  Event fifth;
  int ticks = 0;  // only the ticker's thread uses it
  const auto begun = std::chrono::steady_clock::now();
  Ticker ticker(kLongPeriod, [&] {
    if (++ticks == 5) fifth.Set();
    return true;
  });
  while (!fifth.Wait(kPeriod).has_value()) {
    for (int i = 0; i < 100; ++i) ticker.Wake();
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 5 * kLongPeriod);
}

TEST(TickerTest, DoesNotTickAfterStop) {
  std::atomic<int> ticks{0};
  Ticker ticker(kPeriod, [&] {
    ++ticks;
    return true;
  });
  ticker.Wake();
  ticker.Stop();
  const int before = ticks.load();
  ticker.Wake();
  ticker.Stop();
  EXPECT_EQ(ticks.load(), before);
}

}  // namespace
}  // namespace gradsync::daemon
