// The coordinator's configuration decides how gradients travel between nodes. The other nodes'
// configuration only bounds what the engine takes there. Runs outside Bazel's sandbox: inside it
// root cannot become another user.

#include <string>

#include "gtest/gtest.h"
#include "tests/attack/neighbours.h"
#include "tests/fault/trainer.h"
#include "tests/fault/two_nodes.h"

namespace gradsync::fault {
namespace {

TEST(EngineSettingsTest, EveryNodeFollowsTheCoordinator) {
  const TwoNodes nodes({"--engine_lanes=3", "--engine_chunk_bytes=64KiB", "--engine_timeout=20s"},
                       {"--engine_lanes=5", "--engine_wire_type=bfloat16"});
  const auto trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=3 count=200003");
  // The wire type is float32. Node beta's own configuration would round.
  ExpectAll(trainers, "exact_step 2");
}

TEST(EngineSettingsTest, NoNodeHasMoreLanesOrLargerChunksThanItsOwnOptionsSay) {
  const TwoNodes nodes({"--engine_lanes=4", "--engine_chunk_bytes=4MiB"},
                       {"--engine_lanes=3", "--engine_chunk_bytes=64KiB"});
  attack::Neighbour neighbour(nodes.beta());
  const auto trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=3 count=200003");
  ExpectAll(trainers, "exact_step 2");
  const v1::GetStatusResponse here = nodes.alpha().Status();
  const v1::GetStatusResponse there = nodes.beta().Status();
  ASSERT_EQ(here.jobs_size(), 1);
  ASSERT_EQ(there.remote_jobs_size(), 1);
  for (const v1::EngineStatus& engine : {here.jobs(0).engine(), there.remote_jobs(0).engine()}) {
    EXPECT_EQ(engine.lanes_size(), 3);
    EXPECT_EQ(engine.chunk_bytes(), std::uint64_t{64} << 10);
  }
  neighbour.ExpectUnharmed();
}

// What the engines of all users take on this node.
std::uint64_t EngineBytes(const TestDaemon& daemon) {
  const v1::GetStatusResponse status = daemon.Status();
  std::uint64_t bytes = 0;
  for (const v1::UserMemory& user : status.users()) bytes += user.engine_bytes();
  return bytes;
}

TEST(EngineSettingsTest, AnEnginesMemoryIsTheUsersWhileItLives) {
  TwoNodes nodes;
  {
    const auto trainers = nodes.Join();
    ExpectAll(trainers, "register buckets=1 count=1000");
    ExpectAll(trainers, "step");
    EXPECT_GT(EngineBytes(nodes.alpha()), std::uint64_t{20} << 20);
    EXPECT_GT(EngineBytes(nodes.beta()), std::uint64_t{20} << 20);
    nodes.beta().Kill();
  }
  // The engine ends with the other node.
  EXPECT_TRUE(nodes.alpha().AwaitStatus([](const v1::GetStatusResponse& status) {
    for (const v1::UserMemory& user : status.users()) {
      if (user.engine_bytes() > 0) return false;
    }
    return true;
  }));
}

TEST(EngineSettingsTest, JobWhoseEngineIsTooLargeForTheQuotaFailsByName) {
  for (const bool coordinator : {true, false}) {
    const std::vector<std::string> small = {"--quota_engine_bytes_per_user=1MiB"};
    const std::vector<std::string> all;
    const TwoNodes nodes(coordinator ? small : all, coordinator ? all : small);
    const auto trainers = nodes.Join();
    for (const auto& trainer : trainers) trainer->Begin("register buckets=1 count=1000");
    for (const auto& trainer : trainers) {
      // The engine may fail before or after the registration.
      Reply reply = trainer->Result();
      if (reply.ok()) reply = trainer->Do("step");
      EXPECT_EQ(reply.reason, "ENGINE_FAILED") << reply;
      EXPECT_EQ(reply.Field("node"), coordinator ? "alpha" : "beta") << reply;
      EXPECT_NE(reply.message.find("quota_engine_bytes_per_user"), std::string::npos) << reply;
    }
  }
}

// Every rank compares with the same values, so the ranks of both nodes have the same bits.
TEST(EngineSettingsTest, Bfloat16WireTypeRoundsEachNodeSumAndTheResultOnce) {
  const TwoNodes nodes({"--engine_wire_type=bfloat16"});
  const auto trainers = nodes.Join();
  ExpectAll(trainers, "register buckets=3 count=40003");
  for (int i = 0; i < 3; ++i) ExpectAll(trainers, "exact_step 2 wire=bfloat16");
  // float64 gradients keep their precision.
  ExpectAll(trainers, "register layout=double buckets=2 count=1000 dtype=float64");
  ExpectAll(trainers, "step layout=double");
}

TEST(EngineSettingsTest, OperationsWithoutGradientsAreNeverRounded) {
  const TwoNodes nodes({"--engine_wire_type=bfloat16"});
  const auto trainers = nodes.Join();
  // bfloat16 cannot represent these sums. They are compared with a tolerance of 1e-6.
  ExpectAll(trainers, "allreduce 1000 op=sum offset=4097");
  ExpectAll(trainers, "broadcast 100000 3");
}

}  // namespace
}  // namespace gradsync::fault
