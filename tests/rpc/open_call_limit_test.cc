#include "daemon/rpc/open_call_limit.h"

#include <gtest/gtest.h>

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kMost = 100;
constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::uint64_t kTickNs = kSecondNs / 20;

class OpenCallLimitTest : public testing::Test {
 protected:
  // Looks a tick later.
  bool Exceeded(std::uint64_t started, std::uint64_t ended) {
    now_ns_ += kTickNs;
    return limit_.Exceeded({started, ended}, now_ns_);
  }

  std::uint64_t now_ns_ = 1000 * kSecondNs;
  OpenCallLimit limit_{kMost};
};

TEST_F(OpenCallLimitTest, ManyCallsMayBeOpen) {
  EXPECT_FALSE(Exceeded(0, 0));
  EXPECT_FALSE(Exceeded(kMost, 0));
  EXPECT_FALSE(Exceeded(10 * kMost, 9 * kMost));
  EXPECT_FALSE(limit_.refuses());
}

TEST_F(OpenCallLimitTest, TooManyEndTheConnectionsOnce) {
  EXPECT_TRUE(Exceeded(kMost + 1, 0));
  EXPECT_TRUE(limit_.refuses());
  EXPECT_FALSE(Exceeded(kMost + 1, 1)) << "they end";
  EXPECT_FALSE(Exceeded(kMost + 1, kMost));
  EXPECT_TRUE(limit_.refuses());
}

TEST_F(OpenCallLimitTest, AConnectionThatSlippedThroughEndsToo) {
  EXPECT_TRUE(Exceeded(kMost + 1, 0));
  EXPECT_TRUE(Exceeded(kMost + 2, kMost));
  EXPECT_FALSE(Exceeded(kMost + 2, kMost));
}

TEST_F(OpenCallLimitTest, NewConnectionsComeOnceTheCallsHaveEnded) {
  EXPECT_TRUE(Exceeded(3 * kMost, 0));
  std::uint64_t ended = 0;
  for (; ended < 3 * kMost; ++ended) {
    EXPECT_FALSE(Exceeded(3 * kMost, ended));
    EXPECT_TRUE(limit_.refuses()) << ended;
  }
  for (std::uint64_t waited_ns = 0; waited_ns <= OpenCallLimit::kQuietNs; waited_ns += kTickNs) {
    EXPECT_TRUE(limit_.refuses()) << waited_ns;
    EXPECT_FALSE(Exceeded(3 * kMost, ended));
  }
  EXPECT_FALSE(limit_.refuses());
  EXPECT_FALSE(Exceeded(4 * kMost, ended));
  EXPECT_TRUE(Exceeded(4 * kMost + 1, ended));
}

// gRPC does not count the ends of calls that it refuses.
TEST_F(OpenCallLimitTest, CallsThatNeverEndDoNotRefuseTheUserForEver) {
  constexpr std::uint64_t kNever = 50 * kMost;
  EXPECT_TRUE(Exceeded(kNever, 0));
  for (int tick = 0; limit_.refuses(); ++tick) {
    EXPECT_FALSE(Exceeded(kNever, 0));
    ASSERT_LT(tick, 100);
  }
  EXPECT_FALSE(Exceeded(kNever + kMost, 0));
  EXPECT_TRUE(Exceeded(kNever + kMost + 100, 0));
}

TEST_F(OpenCallLimitTest, AMistakeNowAndThenIsForgiven) {
  for (std::uint64_t call = 0; call < 10 * kMost; ++call) {
    for (int tick = 0; tick < 20; ++tick) EXPECT_FALSE(Exceeded(call, 0)) << call;
  }
  // Not more often than that.
  std::uint64_t call = 10 * kMost;
  const std::uint64_t since_ns = now_ns_;
  while (!Exceeded(call, 0)) ++call;
  EXPECT_LT(now_ns_, since_ns + 10 * kSecondNs);
}

TEST_F(OpenCallLimitTest, ALongTimeWithoutALookForgivesLittle) {
  EXPECT_FALSE(Exceeded(0, 0));
  now_ns_ += 3600 * kSecondNs;
  EXPECT_TRUE(Exceeded(kMost + OpenCallLimit::kForgivenAtOnce + 1, 0));
}

TEST_F(OpenCallLimitTest, WhatIsForgivenIsOpen) {
  EXPECT_FALSE(Exceeded(kMost, 0));
  for (int tick = 0; tick < 20 * 200; ++tick) EXPECT_FALSE(Exceeded(kMost, 0));
  EXPECT_FALSE(Exceeded(kMost, kMost)) << "they have ended after all";
  EXPECT_FALSE(Exceeded(2 * kMost, kMost));
  EXPECT_TRUE(Exceeded(2 * kMost + 2, kMost));
}

}  // namespace
}  // namespace gradsync::daemon
