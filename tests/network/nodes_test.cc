// Jobs that span nodes of a network: what they compute, and how nodes join and leave.

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"
#include "tests/network/networked_nodes.h"

namespace gradsync::fault {
namespace {

class NodeCountTest : public testing::TestWithParam<int> {};

TEST_P(NodeCountTest, ResultIsBitwiseTheSumPerNodeThenOverNodes) {
  NetworkedNodes nodes(GetParam(), 1'000'000'000);
  const Trainers trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=3 count=40003");
  for (int i = 0; i < 3; ++i) ExpectAll(trainers, "exact_step 2");
  for (const char* dtype : {"float64", "float16", "bfloat16"}) {
    const std::string layout = std::string(" layout=") + dtype;
    ExpectAll(trainers, "register buckets=2 count=5001 dtype=" + std::string(dtype) + layout);
    ExpectAll(trainers, "step times=3" + layout);
  }
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "allreduce 1000");
  ExpectAll(trainers, "broadcast 1000000 " + std::to_string(nodes.world_size() - 1));
  ExpectAll(trainers, "leave");
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Quit(), 0);
}

INSTANTIATE_TEST_SUITE_P(Nodes, NodeCountTest, testing::Values(2, 3));

TEST(Network, BucketTakesTheTimeThatItsLinkNeeds) {
  NetworkedNodes nodes(2, 200'000'000);
  // Loopback addresses keep no rate.
  if (!nodes.real()) GTEST_SKIP() << nodes.network().description();
  const Trainers trainers = nodes.Join();
  // 5 MB cross the link of each node once, in both directions at the same time.
  ExpectAll(trainers, "register buckets=1 count=1250000");
  ExpectAll(trainers, "step");
  for (const Reply& reply : DoAll(trainers, "step")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_GE(reply.end_ns - reply.start_ns, 190'000'000u) << reply;
  }
}

TEST(Network, ShortInterruptionLosesNoRank) {
  NetworkedNodes nodes(2);
  // Loopback addresses have no cable to pull.
  if (!nodes.real()) GTEST_SKIP() << nodes.network().description();
  const Trainers trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step");
  for (const auto& trainer : trainers) trainer->Begin("step times=200");
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(nodes.network().SetLink(1, false).ok());
    ASSERT_TRUE(nodes.network().SetLink(1, true).ok());
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Result();
    EXPECT_TRUE(reply.ok()) << reply;
  }
}

TEST(Leaving, NodeWithoutRanksStopsDuringTheOthersSteps) {
  NetworkedNodes nodes(3, 1'000'000'000);
  Trainers trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=4 count=100000");
  ExpectAll(trainers, "step");
  for (const int rank : {5, 4}) {
    const Reply left = trainers[rank]->Do("leave");
    EXPECT_TRUE(left.ok()) << left;
    trainers.pop_back();
  }
  std::atomic<bool> stopped{false};
  std::thread stop([&] {
    EXPECT_EQ(nodes.daemon(2).Stop(), 0);
    stopped = true;
  });
  const std::string steps = "step times=10 ranks=0,1,2,3";
  while (!stopped) ExpectAll(trainers, steps);
  stop.join();
  ExpectAll(trainers, steps);
}

TEST(Joining, JobWaitsForALateNode) {
  NetworkedNodes nodes(3);
  EXPECT_EQ(nodes.daemon(2).Stop(), 0);
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < nodes.world_size(); ++rank) {
    trainers.push_back(nodes.MakeRank(rank));
    trainers.back()->Send(trainers.back()->join());
  }
  for (const int rank : {0, 1, 2, 3}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
    trainers[rank]->Send("register buckets=2 count=1000");
  }
  nodes.daemon(2).Start();
  for (const int rank : {4, 5}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
    trainers[rank]->Send("register buckets=2 count=1000");
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  ExpectAll(trainers, "step times=3");
}

TEST(Joining, JobWaitsForALateCoordinator) {
  // The nodes know its address before it listens: the default port on the node of MASTER_ADDR.
  NetworkedNodes nodes(2, 0, 7417);
  // On loopback addresses the daemons listen on any free port, not on the default one.
  if (!nodes.real()) GTEST_SKIP() << nodes.network().description();
  EXPECT_EQ(nodes.coordinator(), "10.99.0.1:7417");
  EXPECT_EQ(nodes.daemon(0).Stop(), 0);
  Trainers trainers;
  for (const std::uint32_t rank : {0, 1, 2, 3}) {
    trainers.push_back(nodes.MakeRank(rank, "coordinator=" + nodes.network().address(0)));
    trainers.back()->Send(trainers.back()->join());
  }
  nodes.daemon(0).Start();
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step times=3");
}

TEST(Joining, CoordinatorsPortDefaultsToThatOfTheRanksDaemon) {
  NetworkedNodes nodes(2, 0, 9417);
  // On loopback addresses the daemons listen on different ports.
  if (!nodes.real()) GTEST_SKIP() << nodes.network().description();
  EXPECT_EQ(nodes.coordinator(), "10.99.0.1:9417");
  Trainers trainers;
  for (const std::uint32_t rank : {0, 1, 2, 3}) {
    trainers.push_back(nodes.MakeRank(rank, "coordinator=" + nodes.network().address(0)));
  }
  JoinAll(trainers);
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step");
}

// A rank with a wrong token waits in a job of its own, whichever comes first. Its time-out says
// why.
TEST(Joining, WrongTokenWaitsInAnyOrderAndItsTimeOutSaysWhy) {
  NetworkedNodes nodes(2);
  const auto expect_why = [](const Reply& reply) {
    EXPECT_EQ(reply.reason, "LAYOUT_TIMEOUT") << reply;
    for (const char* part : {"rank 0", "another token", "GRADSYNC_JOB_TOKEN"}) {
      EXPECT_NE(reply.message.find(part), std::string::npos) << reply;
    }
  };
  const auto first = nodes.MakeRank(0, "token=right");
  ASSERT_TRUE(first->Join().ok());
  const auto late = nodes.MakeRank(2, "token=wrong");
  ASSERT_TRUE(late->Join().ok());
  expect_why(late->Do("register buckets=2 timeout_ms=500"));

  const std::string job = "job=late coordinator=" + nodes.coordinator();
  const auto early = nodes.MakeRank(2, job + " token=wrong");
  ASSERT_TRUE(early->Join().ok());
  const auto rank_0 = nodes.MakeRank(0, job + " token=right");
  ASSERT_TRUE(rank_0->Join().ok());
  expect_why(early->Do("register buckets=2 timeout_ms=500"));
}

// A stranger knows the job's id and the user, not the token. Its ranks, above all its rank 0 on the
// coordinator, come before, between and after those of the job.
TEST(Joining, StrangersRanksNeitherEndNorJoinAFormingJob) {
  NetworkedNodes nodes(3);
  const auto join_at_once = [&nodes](std::uint32_t rank, const std::string& token) {
    auto trainer = nodes.MakeRank(rank, "token=" + token);
    const Reply reply = trainer->Join();
    EXPECT_TRUE(reply.ok()) << "rank " << rank << " of " << token << ": " << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(5'000'000'000u * kScale, reply.start_ns))
        << reply;
    return trainer;
  };
  Trainers strangers;
  Trainers trainers(nodes.world_size());
  strangers.push_back(join_at_once(2, "stranger"));
  for (const std::uint32_t rank : {4, 5}) {
    trainers[rank] = join_at_once(rank, "right");
    trainers[rank]->Begin("register buckets=2 count=1000");
  }
  strangers.push_back(join_at_once(0, "stranger"));
  strangers.push_back(join_at_once(0, "second_stranger"));
  for (const std::uint32_t rank : {3, 2}) {
    trainers[rank] = join_at_once(rank, "right");
    trainers[rank]->Begin("register buckets=2 count=1000");
  }
  for (const std::uint32_t rank : {1, 0}) {
    trainers[rank] = join_at_once(rank, "right");
    trainers[rank]->Begin("register buckets=2 count=1000");
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Result();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  ExpectAll(trainers, "step times=3");
  strangers.push_back(join_at_once(3, "stranger"));
  ExpectAll(trainers, "step times=3");
}

// The two jobs have the same user, id and nodes. Their layouts differ, so no rank could join the
// other job.
TEST(Joining, TwoTokensAreTwoJobsAndOneOutlivesTheOther) {
  NetworkedNodes nodes(2);
  const Trainers red = nodes.Join("token=crimson");
  const Trainers blue = nodes.Join("token=azure");
  ExpectAll(red, "register buckets=2 count=1000");
  ExpectAll(blue, "register buckets=3 count=500");
  const auto begin = [](const Trainers& trainers) {
    for (const auto& trainer : trainers) trainer->Begin("step times=10");
  };
  begin(red);
  begin(blue);
  for (const Trainers* trainers : {&red, &blue}) {
    for (const auto& trainer : *trainers) {
      const Reply reply = trainer->Result();
      EXPECT_TRUE(reply.ok()) << reply;
    }
  }
  EXPECT_EQ(nodes.daemon(0).Status().jobs_size(), 2);
  EXPECT_EQ(nodes.daemon(1).Status().remote_jobs_size(), 2);

  red[2]->Kill();  // on the second node
  for (const std::uint32_t rank : {0, 1, 3}) {
    const Reply reply = red[rank]->Do("step");
    EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  }
  ExpectAll(blue, "step times=10");
  // The next run of the red job does not end the blue one either.
  const Trainers again = nodes.Join("token=crimson");
  ExpectAll(again, "register buckets=2 count=1000");
  ExpectAll(again, "step times=2");
  ExpectAll(blue, "step times=10");
}

TEST(Joining, TokenOfAnEndedRunNoLongerCounts) {
  NetworkedNodes nodes(2);
  const auto make_ranks = [&nodes](const std::string& token,
                                   const std::vector<std::uint32_t>& order) {
    Trainers trainers;
    for (const std::uint32_t rank : order) {
      trainers.push_back(nodes.MakeRank(rank, "token=" + token));
      const Reply reply = trainers.back()->Join();
      EXPECT_TRUE(reply.ok()) << reply;
    }
    return trainers;
  };
  const Trainers before = make_ranks("before", {0, 1, 2, 3});
  ExpectAll(before, "register buckets=2 count=1000");
  before[2]->Signal(SIGKILL);
  for (const std::uint32_t rank : {0, 1, 3}) {
    before[rank]->Begin("step");
    EXPECT_EQ(before[rank]->Result().reason, "RANK_LOST");
  }
  // Rank 0 of the next run joins last.
  const Trainers after = make_ranks("after", {2, 3, 1, 0});
  ExpectAll(after, "register buckets=2 count=1000");
  ExpectAll(after, "step");
}

TEST(Joining, LayoutMismatchNamesBothRanksAndTheirNodes) {
  NetworkedNodes nodes(3);
  const Trainers trainers = nodes.Join();
  for (std::uint32_t rank = 0; rank < trainers.size(); ++rank) {
    trainers[rank]->Send(NetworkedNodes::NodeOf(rank) == 2
                             ? "register buckets=2 parameters=weight:10x10"
                             : "register buckets=2 parameters=weight:10x11");
  }
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_EQ(reply.code, "FAILED_PRECONDITION") << reply;
    EXPECT_EQ(reply.reason, "LAYOUT_MISMATCH") << reply;
    // The order in which the ranks register decides which one it names.
    EXPECT_THAT(reply.message, testing::ContainsRegex("[0-3] .node (alpha|beta)."));
    EXPECT_THAT(reply.message, testing::ContainsRegex("[45] .node gamma."));
    EXPECT_THAT(reply.message, testing::HasSubstr("weight"));
  }
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
}

}  // namespace
}  // namespace gradsync::fault
