// The contract of engine.h, for the engines that run in the test's process.

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/engine/engine_cluster.h"
#include "tests/engine/engine_contract.h"
#include "tests/engine/loopback_engine.h"
#include "tests/engine/test_certificates.h"

namespace gradsync::daemon {

std::vector<std::unique_ptr<Engine>> Engines(const Kind& kind) {
  std::vector<std::unique_ptr<Engine>> engines;
  if (kind.nodes == 1) {
    engines.push_back(std::make_unique<LoopbackEngine>());
    return engines;
  }
  TcpOptions options = LoopbackAddresses(kind.nodes);
  options.lanes = kind.lanes;
  options.chunk_bytes = kind.chunk_bytes;
  options.wire = kind.wire;
  if (kind.tls) options.keys = std::make_shared<const PeerTlsKeys>(TestCertificates().keys());
  return TcpCluster(options);
}

namespace {

INSTANTIATE_TEST_SUITE_P(
    Engines, EngineContract,
    testing::Values(Kind{"Loopback", 1, 1, 0}, Kind{"Tcp2", 2, 2, std::size_t{1} << 20},
                    Kind{"Tcp3", 3, 2, 64 * 1024}, Kind{"Tcp3OneLane", 3, 1, 32 * 1024},
                    Kind{"Tls3", 3, 2, 64 * 1024, WireType::kSame, /*tls=*/true},
                    Kind{"Tcp2Bfloat16", 2, 2, 64 * 1024, WireType::kBfloat16},
                    Kind{"Tcp3Float16", 3, 4, 64 * 1024, WireType::kFloat16}),
    [](const testing::TestParamInfo<Kind>& kind) { return kind.param.name; });

}  // namespace
}  // namespace gradsync::daemon
