#include "daemon/base/trim_ticker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include "daemon/base/executor.h"
#include "daemon/base/heap_trimmer.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

// Counts the trims, and runs them.
class CountingExecutor final : public Executor {
 public:
  void Run(std::function<void()> work) override {
    work();
    ++trims_;
  }
  int trims() const { return trims_.load(); }

 private:
  std::atomic<int> trims_{0};
};

class TrimTickerTest : public testing::Test {
 protected:
  const std::vector<char> in_use_ = std::vector<char>(std::size_t{64} << 20, 1);
  ManualClock clock_;
  CountingExecutor executor_;
  HeapTrimmer trimmer_{&executor_};
  TrimTicker ticker_{&trimmer_, &clock_, std::chrono::milliseconds(1)};
};

TEST_F(TrimTickerTest, TrimsOnceMoreWhenTheLastUserHasLeft) {
  ticker_.Used();
  EXPECT_TRUE(Soon([&] { return executor_.trims() == 2; })) << "while it is used, and afterwards";
  ticker_.Used();
  // The clock stands still, so it is too early for a trim while it is used.
  EXPECT_TRUE(Soon([&] { return executor_.trims() == 3; })) << "the next user has left";
}

}  // namespace
}  // namespace gradsync::daemon
