// Two nodes cannot reach each other, but both reach the coordinator. So the messages of their ranks
// arrive, and their gradients do not.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"
#include "tests/network/networked_nodes.h"

namespace gradsync::fault {
namespace {

// The longest time until every rank gets the error of a cut link.
constexpr std::uint64_t kSilenceBoundNs = 10'000'000'000ull * kScale;

class CutTest : public testing::Test {
 protected:
  void SetUp() override {
    // Loopback addresses cannot be separated.
    if (!nodes_.real()) GTEST_SKIP() << nodes_.network().description();
  }

  void SetCut(bool cut) {
    for (const int node : {1, 2}) ASSERT_TRUE(nodes_.network().SetIsolated(node, cut).ok());
  }

  // Expects that the running call of every rank on every node ends in time, with an error that
  // names one of the two nodes.
  static void ExpectNamed(const Trainers& trainers, std::uint64_t since_ns) {
    for (std::size_t rank = 0; rank < trainers.size(); ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank);
      const Reply reply = trainers[rank]->Result();
      EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
      EXPECT_TRUE(reply.reason == "ENGINE_TIMEOUT" || reply.reason == "ENGINE_PEER_LOST") << reply;
      EXPECT_TRUE(reply.Field("node") == "beta" || reply.Field("node") == "gamma") << reply;
      EXPECT_TRUE(absl::StrContains(reply.message, "node " + reply.Field("node"))) << reply;
      EXPECT_LE(reply.end_ns - since_ns, FairBoundNs(kSilenceBoundNs, since_ns)) << reply;
    }
  }

  // Starts the job again on the first `nodes` nodes, and runs steps.
  void ExpectJobOf(int nodes) {
    const Trainers trainers = nodes_.JoinOn(nodes);
    ExpectAll(trainers, "register buckets=2 count=1000");
    ExpectAll(trainers, "step times=3");
  }

  // Half the default. A shorter timeout expires by mistake on a busy machine.
  NetworkedNodes nodes_{3, 0, 0, {"--engine_timeout=4s"}};
};

TEST_F(CutTest, WaitingRanksLearnWhichNodesAreCut) {
  {
    const Trainers trainers = nodes_.Join();
    ExpectAll(trainers, "register buckets=4 count=100000");
    ExpectAll(trainers, "step times=2");
    for (const auto& trainer : trainers) trainer->Begin("wait 3");
    SetCut(true);
    ExpectNamed(trainers, NowNs());
  }
  // The coordinator and beta still reach each other.
  ExpectJobOf(2);
  SetCut(false);
  ExpectJobOf(3);
}

TEST_F(CutTest, RunningExchangesEndWithTheNamesOfTheCutNodes) {
  {
    const Trainers trainers = nodes_.Join();
    ExpectAll(trainers, "register buckets=4 count=100000");
    for (const auto& trainer : trainers) trainer->Begin("step times=1000000");
    ASSERT_TRUE(nodes_.daemon(0).AwaitStatus(
        [](const auto& status) { return status.jobs(0).layouts(0).step() > 5; }));
    SetCut(true);
    ExpectNamed(trainers, NowNs());
  }
  SetCut(false);
  ExpectJobOf(3);
}

TEST_F(CutTest, NodesThatCannotConnectAreNamed) {
  SetCut(true);
  {
    const Trainers trainers = nodes_.Join();
    // The engine gives up a few seconds after Join(). Nothing needs to succeed before that.
    for (const auto& trainer : trainers) trainer->Begin("allreduce 1000");
    ExpectNamed(trainers, NowNs());
  }
  SetCut(false);
  ExpectJobOf(3);
}

}  // namespace
}  // namespace gradsync::fault
