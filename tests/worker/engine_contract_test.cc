// The contract of engine.h, for engines in processes of their own.

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "tests/engine/engine_contract.h"
#include "tests/engine/test_certificates.h"
#include "tests/worker/process_cluster.h"

namespace gradsync::daemon {

std::vector<std::unique_ptr<Engine>> Engines(const Kind& kind) {
  EngineOptions options = ProcessOptions(kind.nodes);
  options.lanes = kind.lanes;
  options.chunk_bytes = kind.chunk_bytes;
  options.wire = kind.wire;
  if (kind.tls) options.keys = std::make_shared<const PeerTlsKeys>(TestCertificates().keys());
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& engine : ConnectProcesses(options)) {
    if (!engine.ok()) {
      ADD_FAILURE() << engine.status();
      return {};
    }
    engines.push_back(*std::move(engine));
  }
  return engines;
}

namespace {

INSTANTIATE_TEST_SUITE_P(
    Processes, EngineContract,
    testing::Values(Kind{"Process2", 2, 2, std::size_t{1} << 20},
                    Kind{"Process3OneLane", 3, 1, 32 * 1024},
                    Kind{"Process2Tls", 2, 2, std::size_t{1} << 20, WireType::kSame, /*tls=*/true},
                    Kind{"Process2Bfloat16", 2, 2, 64 * 1024, WireType::kBfloat16}),
    [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });

}  // namespace
}  // namespace gradsync::daemon
