#include "daemon/base/heap_trimmer.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/executor.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::size_t kMiB = std::size_t{1} << 20;

// Keeps work until a test runs it.
class HeldExecutor final : public Executor {
 public:
  void Run(std::function<void()> work) override { held_.push_back(std::move(work)); }
  std::size_t held() const { return held_.size(); }
  void RunNext() {
    const std::function<void()> work = std::move(held_.front());
    held_.pop_front();
    work();
  }

 private:
  std::deque<std::function<void()>> held_;
};

// In use, and of no allocator's heap: trimming does not change it.
std::vector<char> InUse(std::size_t bytes) { return std::vector<char>(bytes, 1); }

class HeapTrimmerTest : public testing::Test {
 protected:
  // Ticks each second from `from_s` to before `to_s`, and trims when asked to. Returns when that
  // was.
  std::vector<int> TrimsBetween(int from_s, int to_s) {
    std::vector<int> trims;
    for (int now_s = from_s; now_s < to_s; ++now_s) {
      trimmer_.Tick(static_cast<std::uint64_t>(now_s) * kSecond);
      if (executor_.held() == 0) continue;
      executor_.RunNext();
      trims.push_back(now_s);
    }
    return trims;
  }

  HeldExecutor executor_;
  HeapTrimmer trimmer_{&executor_};
};

TEST_F(HeapTrimmerTest, GivesBackFreedMemoryBelowMemoryInUse) {
  // The allocator takes blocks of this size from its heap, whose last block stays in use.
  std::vector<std::unique_ptr<std::vector<char>>> blocks;
  for (std::size_t i = 0; i < 2048; ++i) {
    blocks.push_back(std::make_unique<std::vector<char>>(64 << 10, 1));
  }
  blocks.erase(blocks.begin(), blocks.end() - 1);
  ASSERT_GT(AnonymousMemoryBytes(), 100 * kMiB) << "the allocator keeps it";

  trimmer_.Tick(0);
  ASSERT_EQ(executor_.held(), 1u);
  ASSERT_GT(AnonymousMemoryBytes(), 100 * kMiB) << "the executor trims, not the caller";
  executor_.RunNext();
  EXPECT_LT(AnonymousMemoryBytes(), HeapTrimmer::kSmallBytes);
}

TEST_F(HeapTrimmerTest, LeavesASmallProcessAlone) {
  ASSERT_LT(AnonymousMemoryBytes(), HeapTrimmer::kSmallBytes);
  EXPECT_EQ(TrimsBetween(0, 20), std::vector<int>());
  EXPECT_FALSE(trimmer_.TickUnused(20 * kSecond));
  EXPECT_EQ(executor_.held(), 0u);
}

TEST_F(HeapTrimmerTest, TrimsLessAndLessOftenWhileThatFreesNothing) {
  const auto memory = InUse(64 * kMiB);
  EXPECT_EQ(TrimsBetween(0, 1000), (std::vector<int>{0, 5, 15, 35, 75, 155, 315, 615, 915}));
}

TEST_F(HeapTrimmerTest, TrimsSoonAfterMemoryHasGrown) {
  const auto memory = InUse(64 * kMiB);
  TrimsBetween(0, 320);
  const auto more = InUse(64 * kMiB);
  EXPECT_EQ(TrimsBetween(320, 340), (std::vector<int>{320, 325, 335}));
}

TEST_F(HeapTrimmerTest, TrimsOnceWhenTheLastUserHasLeft) {
  const auto memory = InUse(64 * kMiB);
  TrimsBetween(0, 320);  // the next one would be five minutes later
  EXPECT_TRUE(trimmer_.TickUnused(320 * kSecond));
  EXPECT_TRUE(trimmer_.TickUnused(321 * kSecond)) << "it has yet to trim";
  ASSERT_EQ(executor_.held(), 1u);
  executor_.RunNext();
  EXPECT_FALSE(trimmer_.TickUnused(322 * kSecond)) << "an unused daemon sleeps";
  EXPECT_FALSE(trimmer_.TickUnused(2000 * kSecond));
  EXPECT_EQ(executor_.held(), 0u);
}

TEST_F(HeapTrimmerTest, TrimThatBeganWhileSomebodyWasThereIsNotTheLastOne) {
  const auto memory = InUse(64 * kMiB);
  trimmer_.Tick(0);
  EXPECT_TRUE(trimmer_.TickUnused(1 * kSecond));
  ASSERT_EQ(executor_.held(), 1u);
  executor_.RunNext();
  EXPECT_TRUE(trimmer_.TickUnused(2 * kSecond));
  ASSERT_EQ(executor_.held(), 1u);
  executor_.RunNext();
  EXPECT_FALSE(trimmer_.TickUnused(3 * kSecond));
}

TEST_F(HeapTrimmerTest, TrimsAgainWhenTheNextUserHasLeft) {
  const auto memory = InUse(64 * kMiB);
  EXPECT_TRUE(trimmer_.TickUnused(0));
  executor_.RunNext();
  EXPECT_FALSE(trimmer_.TickUnused(1 * kSecond));
  TrimsBetween(2, 4);
  EXPECT_TRUE(trimmer_.TickUnused(4 * kSecond));
  EXPECT_EQ(executor_.held(), 1u);
}

TEST_F(HeapTrimmerTest, TrimsOnceAtATime) {
  const auto memory = InUse(64 * kMiB);
  trimmer_.Tick(0);
  trimmer_.Tick(1000 * kSecond);
  EXPECT_EQ(executor_.held(), 1u);
  executor_.RunNext();
  trimmer_.Tick(1000 * kSecond);
  EXPECT_EQ(executor_.held(), 1u);
}

}  // namespace
}  // namespace gradsync::daemon
