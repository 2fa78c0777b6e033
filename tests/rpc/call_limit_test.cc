#include "daemon/rpc/call_limit.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kMost = 120;
constexpr std::uint64_t kEnough = 100;
constexpr std::uint64_t kMostOfOne = 50;

class CallLimitTest : public testing::Test {
 protected:
  explicit CallLimitTest(const CallLimit::Bounds& bounds = {kMost, kEnough, kMostOfOne})
      : limit_(bounds) {
    ToEnd(0, {});
  }

  // The counts when `open` of `started_` calls are open.
  CallCounts Open(std::uint64_t open) const { return {started_, started_ - open}; }
  bool NeedsConnections(std::uint64_t counted) { return limit_.NeedsConnections(Open(counted)); }
  // The places of the connections to end.
  std::vector<std::size_t> ToEnd(std::uint64_t counted, const std::vector<std::uint64_t>& open) {
    return limit_.ToEnd(Open(counted), open);
  }

  CallLimit limit_;
  std::uint64_t started_ = 100'000;
};

TEST_F(CallLimitTest, ManyCallsMayBeOpen) {
  EXPECT_FALSE(NeedsConnections(0));
  EXPECT_FALSE(NeedsConnections(kMost));
  EXPECT_TRUE(NeedsConnections(kMost + 1));
}

TEST_F(CallLimitTest, TheBusiestConnectionsEndUntilEnoughCallsAreLeft) {
  ASSERT_TRUE(NeedsConnections(131));
  EXPECT_EQ(ToEnd(131, {30, 31, 10, 30, 30}), std::vector<std::size_t>{1}) << "100 calls are left";
  EXPECT_EQ(ToEnd(132, {30, 30, 30, 42}), std::vector<std::size_t>{3});
  EXPECT_EQ(ToEnd(150, {40, 40, 50, 20}), std::vector<std::size_t>{2});
  EXPECT_EQ(ToEnd(151, {40, 41, 50, 20}), (std::vector<std::size_t>{2, 1}))
      << "101 are one too many";
}

TEST_F(CallLimitTest, EachConnectionWithMoreThanItMayHaveEnds) {
  EXPECT_EQ(ToEnd(313, {52, 10, 200, 51}), (std::vector<std::size_t>{2, 0, 3}));
  EXPECT_EQ(ToEnd(300, {50, 200, 50}), std::vector<std::size_t>{1});
}

TEST_F(CallLimitTest, CallsThatNeverEndEndNoConnection) {
  ASSERT_TRUE(NeedsConnections(1000));
  EXPECT_EQ(ToEnd(1000, {30, 30}), std::vector<std::size_t>{})
      << "940 are in the server's count alone";
  EXPECT_FALSE(NeedsConnections(940 + kMost));
  EXPECT_TRUE(NeedsConnections(940 + kMost + 1));
  EXPECT_EQ(ToEnd(940 + kMost + 1, {kMost + 1}), std::vector<std::size_t>{0});
}

TEST_F(CallLimitTest, TheLimitIsTheOldOneOnceTheyHaveEndedAfterAll) {
  ASSERT_TRUE(NeedsConnections(1000));
  EXPECT_EQ(ToEnd(1000, {}), std::vector<std::size_t>{});
  EXPECT_FALSE(NeedsConnections(1000 + kMost));
  EXPECT_FALSE(NeedsConnections(5));
  EXPECT_TRUE(NeedsConnections(5 + kMost + 1));
}

// The server has answered them, and gRPC has not let them go yet.
TEST_F(CallLimitTest, CallsThatOnlyTheConnectionStillHoldsAreFound) {
  started_ += kMost;
  EXPECT_FALSE(NeedsConnections(0));
  started_ += 1;
  EXPECT_TRUE(NeedsConnections(0));
  EXPECT_EQ(ToEnd(0, {10, kMost + 1}), std::vector<std::size_t>{1});
  EXPECT_FALSE(NeedsConnections(0));
  started_ += kMost;
  EXPECT_FALSE(NeedsConnections(0));
  started_ += 1;
  EXPECT_TRUE(NeedsConnections(0)) << "every so many calls";
}

// One whose connections with at most 4 calls may have 80 calls together.
class CallLimitOfPeersTest : public CallLimitTest {
 protected:
  CallLimitOfPeersTest() : CallLimitTest({kMost, kEnough, kMostOfOne, /*few=*/4, 80}) {}
};

TEST_F(CallLimitOfPeersTest, OnlyBusyConnectionsEndForTheCallsOfBusyOnes) {
  EXPECT_EQ(ToEnd(140, {4, 70, 3, 41, 22}), std::vector<std::size_t>{1});
  EXPECT_EQ(ToEnd(127, {4, 70, 3, 37, 13}), std::vector<std::size_t>{}) << "as many as they may";
}

TEST_F(CallLimitOfPeersTest, ManyConnectionsWithFewCallsGoOn) {
  const std::vector<std::uint64_t> nodes(80, 1);
  ASSERT_TRUE(NeedsConnections(kMost + 1));
  EXPECT_EQ(ToEnd(80, nodes), std::vector<std::size_t>{});
  EXPECT_FALSE(NeedsConnections(80 + kMost)) << "theirs do not count";
  EXPECT_TRUE(NeedsConnections(80 + kMost + 1));
}

TEST_F(CallLimitOfPeersTest, SomeOfThemEndIfTheyAreTooMany) {
  std::vector<std::uint64_t> nodes(81, 1);
  nodes[7] = 4;
  EXPECT_EQ(ToEnd(84, nodes), std::vector<std::size_t>{7});
}

}  // namespace
}  // namespace gradsync::daemon
