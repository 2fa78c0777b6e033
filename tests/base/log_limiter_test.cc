#include "daemon/base/log_limiter.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

class LogLimiterTest : public ::testing::Test {
 protected:
  int AllowedOf(int lines, std::string_view message, const LogSubject& subject = {}) {
    int allowed = 0;
    for (int i = 0; i < lines; ++i) allowed += limiter_.Allow(message, subject) ? 1 : 0;
    return allowed;
  }

  ManualClock clock_;
  LogLimiter limiter_{&clock_, 3};
};

TEST_F(LogLimiterTest, AllowsTheLimitPerMessageAndSecond) {
  EXPECT_EQ(AllowedOf(10, "a"), 3);
  EXPECT_EQ(AllowedOf(2, "b"), 2);
  clock_.Advance(kSecond - 1);
  EXPECT_EQ(AllowedOf(10, "a"), 0);
  clock_.Advance(1);
  EXPECT_EQ(AllowedOf(10, "a"), 3);
}

TEST_F(LogLimiterTest, AUsersLinesLeaveThoseOfOthersAlone) {
  for (int i = 0; i < 100; ++i) limiter_.Allow("a", {"uid", "1000"});
  EXPECT_TRUE(limiter_.Allow("a", {"uid", "1001"}));
  EXPECT_EQ(AllowedOf(10, "a"), 3);
  clock_.Advance(kSecond);
  const auto suppressed = limiter_.TakeSuppressed();
  ASSERT_EQ(suppressed.size(), 2u);
  EXPECT_EQ(suppressed[0].subject.value, "");
  EXPECT_EQ(suppressed[1].subject.field, "uid");
  EXPECT_EQ(suppressed[1].subject.value, "1000");
  EXPECT_EQ(suppressed[1].count, 97u);
}

TEST_F(LogLimiterTest, SecondBeginsWithItsFirstLine) {
  clock_.Advance(5 * kSecond + kSecond / 2);
  EXPECT_EQ(AllowedOf(3, "a"), 3);
  clock_.Advance(kSecond / 2 + 1);
  EXPECT_EQ(AllowedOf(1, "a"), 0);
  clock_.Advance(kSecond / 2 - 1);
  EXPECT_EQ(AllowedOf(3, "a"), 3);
}

TEST_F(LogLimiterTest, ReturnsEachCountOnceAfterItsSecond) {
  AllowedOf(10, "a");
  AllowedOf(5, "b");
  AllowedOf(1, "c");
  EXPECT_TRUE(limiter_.TakeSuppressed().empty());
  clock_.Advance(kSecond);
  const auto taken = limiter_.TakeSuppressed();
  ASSERT_EQ(taken.size(), 2u);
  EXPECT_EQ(taken[0].message, "a");
  EXPECT_EQ(taken[0].count, 7u);
  EXPECT_EQ(taken[1].message, "b");
  EXPECT_EQ(taken[1].count, 2u);
  EXPECT_TRUE(limiter_.TakeSuppressed().empty());
  EXPECT_TRUE(limiter_.TakeAllSuppressed().empty());
}

TEST_F(LogLimiterTest, TakeAllReturnsCountsOfTheRunningSecond) {
  AllowedOf(10, "a");
  const auto taken = limiter_.TakeAllSuppressed();
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].count, 7u);
  EXPECT_EQ(AllowedOf(2, "a"), 0);
  clock_.Advance(kSecond);
  ASSERT_EQ(limiter_.TakeSuppressed().size(), 1u);
}

TEST_F(LogLimiterTest, MemoryIsBounded) {
  for (std::size_t i = 0; i < LogLimiter::kMaxMessages; ++i) {
    EXPECT_EQ(AllowedOf(1, "message " + std::to_string(i)), 1);
  }
  int allowed = 0;
  for (int i = 0; i < 100; ++i) allowed += AllowedOf(1, "other " + std::to_string(i));
  EXPECT_EQ(allowed, 3);
  const auto taken = limiter_.TakeAllSuppressed();
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].message, "(other messages)");
  EXPECT_EQ(taken[0].count, 97u);
}

TEST_F(LogLimiterTest, ManyAddressesLeaveTheCountsOfUsersAlone) {
  for (std::size_t i = 0; i <= 2 * LogLimiter::kMaxMessages; ++i) {
    limiter_.Allow("a", {"address", std::to_string(i)});
  }
  EXPECT_EQ(AllowedOf(10, "b", {"address", "late"}), 0);
  EXPECT_EQ(AllowedOf(10, "b", {"uid", "1000"}), 3);
  EXPECT_EQ(AllowedOf(10, "b"), 3);
}

// Otherwise users who come later would share one count for good.
TEST_F(LogLimiterTest, EndedWindowsAreForgotten) {
  const LogSubject late = {"uid", "late"};
  for (std::size_t i = 0; i <= LogLimiter::kMaxMessages; ++i) {
    limiter_.Allow("a", {"uid", std::to_string(i)});
  }
  EXPECT_EQ(AllowedOf(10, "b", late), 2) << "it shares a count with the last user";
  clock_.Advance(kSecond);
  EXPECT_EQ(limiter_.TakeSuppressed().size(), 1u);
  EXPECT_EQ(AllowedOf(10, "b", late), 3);
  EXPECT_EQ(AllowedOf(10, "c", late), 3);
  clock_.Advance(kSecond);
  const auto suppressed = limiter_.TakeSuppressed();
  ASSERT_EQ(suppressed.size(), 2u);
  EXPECT_EQ(suppressed[0].message, "b");
  EXPECT_EQ(suppressed[1].message, "c");
}

}  // namespace
}  // namespace gradsync::daemon
