// The coordinator's configuration decides how gradients travel between nodes. The other nodes'
// configuration has no effect.

#include <string>

#include "gtest/gtest.h"
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
