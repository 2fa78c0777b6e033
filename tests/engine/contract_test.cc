// The contract of engine.h, for the engines that run in the test's process.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/engine/engine_cluster.h"
#include "tests/engine/engine_contract.h"
#include "tests/engine/loopback_engine.h"

namespace gradsync::daemon {

std::vector<std::unique_ptr<Engine>> Engines(const Kind& kind) {
  std::vector<std::unique_ptr<Engine>> engines;
  if (kind.nodes == 1) {
    engines.push_back(std::make_unique<LoopbackEngine>());
    return engines;
  }
  GlooOptions options = LoopbackAddresses(kind.nodes);
  options.lanes = kind.lanes;
  options.chunk_bytes = kind.chunk_bytes;
  options.wire = kind.wire;
  return GlooCluster(options);
}

namespace {

INSTANTIATE_TEST_SUITE_P(
    Engines, EngineContract,
    testing::Values(Kind{"Loopback", 1, 1, 0}, Kind{"Gloo2", 2, 2, std::size_t{1} << 20},
                    Kind{"Gloo3", 3, 2, 64 * 1024}, Kind{"Gloo3OneLane", 3, 1, 32 * 1024},
                    Kind{"Gloo2Bfloat16", 2, 2, 64 * 1024, WireType::kBfloat16},
                    Kind{"Gloo3Float16", 3, 4, 64 * 1024, WireType::kFloat16}),
    [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });

}  // namespace
}  // namespace gradsync::daemon
