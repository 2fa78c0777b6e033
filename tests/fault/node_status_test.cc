// The status of a job that spans nodes, on its coordinator's node and on another one.

#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"

namespace gradsync::fault {
namespace {

constexpr std::uint64_t kBuckets = 2;
constexpr std::uint64_t kCount = 100'000;
constexpr std::uint64_t kSteps = 3;

template <class Repeated>
std::vector<std::uint32_t> Numbers(const Repeated& numbers) {
  return {numbers.begin(), numbers.end()};
}

using Ranks = std::vector<std::uint32_t>;

// Checks the traffic of one node of two. It sends half of each bucket as addends and the other half
// as sums, and receives as much.
void ExpectTraffic(const v1::EngineStatus& engine) {
  EXPECT_TRUE(engine.connected());
  EXPECT_EQ(engine.nodes_size(), 2);
  EXPECT_EQ(engine.exchanges(), kBuckets * kSteps);
  ASSERT_EQ(engine.lanes_size(), 3);
  std::uint64_t sent = 0, received = 0;
  for (const v1::LaneStatus& lane : engine.lanes()) {
    sent += lane.bytes_sent();
    received += lane.bytes_received();
    EXPECT_GT(lane.busy_s(), 0);
    EXPECT_GT(lane.gbit_per_s(), 0);
  }
  EXPECT_EQ(sent + received, 2 * kBuckets * kSteps * kCount * sizeof(float));
}

class NodeStatusTest : public testing::Test {
 protected:
  // A job has the fewest lanes and the smallest chunks of its nodes.
  TwoNodes nodes_{{"--engine_lanes=3", "--engine_chunk_bytes=32KiB"}, {"--engine_lanes=3"}};
};

TEST_F(NodeStatusTest, CoordinatorShowsNodesLanesAndMissingRanks) {
  const auto trainers = nodes_.Join();
  ExpectAll(trainers, "register buckets=2 count=100000");
  ExpectAll(trainers, "step times=3");
  for (const int rank : {0, 1, 2}) {
    ASSERT_TRUE(trainers[rank]->Do("mark 4 0").ok());
    ASSERT_TRUE(trainers[rank]->Do("mark 4 1").ok());
    ASSERT_TRUE(trainers[rank]->Do("end 4").ok());
    // The coordinator answers this after all earlier messages.
    ASSERT_EQ(trainers[rank]->Do("wait 4 timeout_ms=1").reason, "WAIT_TIMEOUT");
  }
  const v1::GetStatusResponse status = nodes_.alpha().Status();
  EXPECT_EQ(status.node_name(), "alpha");
  EXPECT_EQ(status.remote_jobs_size(), 0);
  ASSERT_EQ(status.jobs_size(), 1);
  const v1::JobStatus& job = status.jobs(0);
  ASSERT_EQ(job.nodes_size(), 2);
  const v1::NodeStatus& here = job.nodes(0);
  EXPECT_EQ(here.name(), "alpha");
  EXPECT_EQ(here.address(), "");
  EXPECT_TRUE(here.connected());
  EXPECT_EQ(Numbers(here.ranks()), (Ranks{0, 1}));
  EXPECT_EQ(Numbers(here.waiting_ranks()), Ranks{});
  const v1::NodeStatus& there = job.nodes(1);
  EXPECT_EQ(there.name(), "beta");
  EXPECT_EQ(there.address(), "127.0.0.1") << "the address that it connected from";
  EXPECT_TRUE(there.connected());
  EXPECT_LT(there.heard_s(), 5);
  EXPECT_EQ(Numbers(there.ranks()), (Ranks{2, 3}));
  EXPECT_EQ(Numbers(there.waiting_ranks()), Ranks{3});
  EXPECT_NE(job.layouts(0).waiting_for().find("rank 3 (node beta)"), std::string::npos);
  ExpectTraffic(job.engine());
}

TEST_F(NodeStatusTest, BarrierNamesTheMissingRanks) {
  const auto trainers = nodes_.Join();
  for (const int rank : {0, 2, 3}) trainers[rank]->Begin("barrier");
  EXPECT_TRUE(nodes_.alpha().AwaitStatus([](const auto& now) {
    const auto& nodes = now.jobs(0).nodes();
    return nodes.size() == 2 && Numbers(nodes.Get(0).waiting_ranks()) == Ranks{1} &&
           nodes.Get(1).waiting_ranks().empty();
  }));
  ASSERT_TRUE(trainers[1]->Do("barrier").ok());
  for (const int rank : {0, 2, 3}) EXPECT_TRUE(trainers[rank]->Result().ok());
}

TEST_F(NodeStatusTest, OtherNodeShowsItsRanksAndTheirCoordinator) {
  const auto trainers = nodes_.Join();
  ExpectAll(trainers, "register buckets=2 count=100000");
  ExpectAll(trainers, "step times=3");
  const v1::GetStatusResponse status = nodes_.beta().Status();
  EXPECT_EQ(status.jobs_size(), 0);
  ASSERT_EQ(status.remote_jobs_size(), 1);
  const v1::RemoteJobStatus& job = status.remote_jobs(0);
  EXPECT_EQ(job.job_id(), "job");
  EXPECT_EQ(job.coordinator(), nodes_.coordinator());
  EXPECT_EQ(job.node_name(), "alpha");
  EXPECT_TRUE(job.connected());
  EXPECT_LT(job.heard_s(), 5);
  ASSERT_EQ(job.sessions_size(), 2);
  for (const int i : {0, 1}) {
    const int rank = static_cast<int>(job.sessions(i).rank());
    EXPECT_EQ(job.sessions(i).pid(), trainers.at(rank)->pid());
  }
  ExpectTraffic(job.engine());
  ExpectAll(trainers, "leave");
  EXPECT_TRUE(
      nodes_.beta().AwaitStatus([](const auto& now) { return now.remote_jobs_size() == 0; }));
}

TEST_F(NodeStatusTest, UnreachableCoordinatorIsShown) {
  const auto trainer =
      std::make_unique<Trainer>(nodes_.beta(), 0, 2, "job", "coordinator=127.0.0.3:1");
  trainer->Begin(trainer->join());
  EXPECT_TRUE(nodes_.beta().AwaitStatus([](const auto& now) {
    return now.remote_jobs_size() == 1 && !now.remote_jobs(0).connected() &&
           now.remote_jobs(0).coordinator() == "127.0.0.3:1" &&
           now.remote_jobs(0).node_name().empty();
  }));
  trainer->Kill();  // saves the wait until the daemon gives up
}

TEST_F(NodeStatusTest, StoppedNodeDisappearsAfterItLeft) {
  const auto trainers = nodes_.Join();
  ExpectAll(trainers, "register buckets=2 count=100");
  ExpectAll(trainers, "step");
  for (const int rank : {2, 3}) ASSERT_TRUE(trainers[rank]->Do("leave").ok());
  EXPECT_EQ(nodes_.beta().Stop(), 0);
  EXPECT_TRUE(nodes_.alpha().AwaitStatus([](const auto& now) {
    const auto& nodes = now.jobs(0).nodes();
    return nodes.size() == 2 && nodes.Get(1).name() == "beta" && !nodes.Get(1).connected() &&
           Numbers(nodes.Get(1).ranks()) == Ranks{2, 3};
  }));
}

}  // namespace
}  // namespace gradsync::fault
