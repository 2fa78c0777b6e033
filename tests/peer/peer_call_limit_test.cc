#include "daemon/peer/peer_call_limit.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kMost = 120;
constexpr std::uint64_t kEnough = 100;
constexpr std::uint64_t kMostOfOne = 50;

// Connections with so many open calls; a connection's port is its place in the list.
std::vector<ConnectionCalls> Connections(const std::vector<std::uint64_t>& open) {
  std::vector<ConnectionCalls> connections;
  for (const std::uint64_t calls : open) {
    ConnectionCalls& connection = connections.emplace_back();
    connection.port = static_cast<std::uint16_t>(connections.size() - 1);
    connection.calls = {calls + 7, 7};
  }
  return connections;
}

class PeerCallLimitTest : public testing::Test {
 protected:
  PeerCallLimitTest() { ToEnd(0, {}); }

  // Of `started_` calls.
  CallCounts Open(std::uint64_t open) const { return {started_, started_ - open}; }
  bool NeedsConnections(std::uint64_t counted) { return limit_.NeedsConnections(Open(counted)); }
  // The ports of the connections to end.
  std::vector<int> ToEnd(std::uint64_t counted, const std::vector<std::uint64_t>& open) {
    std::vector<int> ports;
    for (const auto& found : limit_.ToEnd(Open(counted), Connections(open))) {
      ports.push_back(found.port);
    }
    return ports;
  }

  PeerCallLimit limit_{kMost, kEnough, kMostOfOne};
  std::uint64_t started_ = 100'000;
};

TEST_F(PeerCallLimitTest, ManyCallsMayBeOpen) {
  EXPECT_FALSE(NeedsConnections(0));
  EXPECT_FALSE(NeedsConnections(kMost));
  EXPECT_TRUE(NeedsConnections(kMost + 1));
}

TEST_F(PeerCallLimitTest, TheBusiestConnectionsEndUntilEnoughCallsAreLeft) {
  ASSERT_TRUE(NeedsConnections(131));
  EXPECT_EQ(ToEnd(131, {30, 31, 10, 30, 30}), std::vector<int>{1}) << "100 calls are left";
  EXPECT_EQ(ToEnd(132, {30, 30, 30, 42}), std::vector<int>{3});
  EXPECT_EQ(ToEnd(150, {40, 40, 50, 20}), std::vector<int>{2});
  EXPECT_EQ(ToEnd(151, {40, 41, 50, 20}), (std::vector<int>{2, 1})) << "101 are one too many";
}

TEST_F(PeerCallLimitTest, EachConnectionWithMoreThanItMayHaveEnds) {
  EXPECT_EQ(ToEnd(313, {52, 10, 200, 51}), (std::vector<int>{2, 0, 3}));
  EXPECT_EQ(ToEnd(300, {50, 200, 50}), std::vector<int>{1});
}

TEST_F(PeerCallLimitTest, CallsThatNeverEndEndNoConnection) {
  ASSERT_TRUE(NeedsConnections(1000));
  EXPECT_EQ(ToEnd(1000, {30, 30}), std::vector<int>{}) << "940 are in the server's count alone";
  EXPECT_FALSE(NeedsConnections(940 + kMost));
  EXPECT_TRUE(NeedsConnections(940 + kMost + 1));
  EXPECT_EQ(ToEnd(940 + kMost + 1, {kMost + 1}), std::vector<int>{0});
}

TEST_F(PeerCallLimitTest, TheLimitIsTheOldOneOnceTheyHaveEndedAfterAll) {
  ASSERT_TRUE(NeedsConnections(1000));
  EXPECT_EQ(ToEnd(1000, {}), std::vector<int>{});
  EXPECT_FALSE(NeedsConnections(1000 + kMost));
  EXPECT_FALSE(NeedsConnections(5));
  EXPECT_TRUE(NeedsConnections(5 + kMost + 1));
}

// The server has answered them, and gRPC has not let them go yet.
TEST_F(PeerCallLimitTest, CallsThatOnlyTheConnectionStillHoldsAreFound) {
  started_ += kMost;
  EXPECT_FALSE(NeedsConnections(0));
  started_ += 1;
  EXPECT_TRUE(NeedsConnections(0));
  EXPECT_EQ(ToEnd(0, {10, kMost + 1}), std::vector<int>{1});
  EXPECT_FALSE(NeedsConnections(0));
  started_ += kMost;
  EXPECT_FALSE(NeedsConnections(0));
  started_ += 1;
  EXPECT_TRUE(NeedsConnections(0)) << "every so many calls";
}

}  // namespace
}  // namespace gradsync::daemon
