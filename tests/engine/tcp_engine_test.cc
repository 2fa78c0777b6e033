// What TcpEngine adds to the contract: options, the wire type, errors when other nodes end.

#include "daemon/engine/tcp_engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/peer_mesh.h"
#include "tests/engine/engine_bucket.h"
#include "tests/engine/engine_cluster.h"

namespace gradsync::daemon {
namespace {

std::string NodeOf(const absl::Status& status) {
  for (const auto& [key, value] : DetailsOf(status).fields) {
    if (key == "node") return value;
  }
  return "";
}

TEST(TcpEngineConnect, RefusesOptionsOutOfBounds) {
  MemoryStore store;
  const auto code = [&](void (*change)(TcpOptions*)) {
    TcpOptions options = LoopbackAddresses(2);
    options.store = &store;
    change(&options);
    return TcpEngine::Connect(options).status().code();
  };
  const absl::StatusCode invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](TcpOptions* o) { o->nodes = 1; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->nodes = kMaxEngineNodes + 1; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->node = 2; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->node_names.pop_back(); }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->lanes = 0; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->lanes = EngineSettings::kMaxLanes + 1; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->chunk_bytes = 0; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->chunk_bytes += 1; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->chunk_bytes = 2 * EngineSettings::kMaxChunkBytes; }),
            invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->wire = WireType{}; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->wire = WireType{4}; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->silence_limit = absl::Milliseconds(99); }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->silence_limit = absl::InfiniteDuration(); }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->connect_timeout = absl::ZeroDuration(); }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->store = nullptr; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->address = ""; }), invalid);
  EXPECT_EQ(code([](TcpOptions* o) { o->address = "192.0.2.1"; }), absl::StatusCode::kNotFound);
}

TEST(TcpEngineConnect, NodesWithDifferentOptionsDoNotConnect) {
  TcpOptions options = LoopbackAddresses(2);
  options.connect_timeout = absl::Seconds(5);
  const auto engines = ConnectAll(options, [](std::uint32_t node, TcpOptions* mine) {
    if (node == 1) mine->wire = WireType::kBfloat16;
  });
  for (const auto& engine : engines) {
    EXPECT_EQ(engine.status().code(), absl::StatusCode::kFailedPrecondition) << engine.status();
    EXPECT_TRUE(absl::StrContains(engine.status().message(), "wire=bfloat16"));
  }
}

TEST(TcpEngineConnect, NamesTheNodeThatDoesNotConnect) {
  MemoryStore store;
  TcpOptions options = LoopbackAddresses(2);
  options.store = &store;
  options.connect_timeout = absl::Milliseconds(100);
  const auto engine = TcpEngine::Connect(options);
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(DetailsOf(engine.status()).reason, "ENGINE_TIMEOUT");
  EXPECT_EQ(NodeOf(engine.status()), "node-1");
}

TEST(TcpEngineConnect, NodeLostWhileConnectingIsNamedAtOnce) {
  MemoryStore store;
  TcpOptions options = LoopbackAddresses(2);
  options.store = &store;
  absl::Status status;
  std::thread node([&] { status = TcpEngine::Connect(options).status(); });
  // Node 1 connects one channel of several, and then ends.
  PeerMeshOptions mesh;
  mesh.node = 1;
  mesh.nodes = 2;
  mesh.node_names = options.node_names;
  mesh.address = "127.0.0.1";
  mesh.deadline_ns = MonotonicNowNs() + 60'000'000'000u;
  mesh.store = &store;
  const std::vector<std::string> lines =
      absl::StrSplit(store.Get("watch/0", absl::Seconds(60)).value(), '\n');
  mesh.agreement = lines[1];
  const std::uint64_t start_ns = MonotonicNowNs();
  EXPECT_EQ(ConnectPeers(mesh).status(), absl::OkStatus());
  node.join();
  EXPECT_LT(MonotonicNowNs() - start_ns, 30'000'000'000u);
  EXPECT_EQ(DetailsOf(status).reason, "ENGINE_PEER_LOST") << status;
  EXPECT_EQ(NodeOf(status), "node-1");
}

TEST(TcpEngineConnect, AcceptsAnInterfaceAndNodesWithoutNames) {
  TcpOptions options = LoopbackAddresses(2);
  options.address.clear();
  options.interface = "lo";
  options.node_names.clear();
  EXPECT_EQ(TcpCluster(options).size(), 2u);
}

// The result of one bucket on node 0.
std::vector<std::byte> Reduce(const TcpOptions& options, DataType dtype, std::size_t count,
                              bool exact = false) {
  const auto engines = TcpCluster(options);
  std::vector<std::unique_ptr<EngineBucket>> buckets;
  for (std::uint32_t node = 0; node < engines.size(); ++node) {
    buckets.push_back(std::make_unique<EngineBucket>(dtype, count, node));
    buckets.back()->exchange()->exact = exact;
    engines[node]->Submit(buckets.back()->exchange());
  }
  for (const auto& bucket : buckets) EXPECT_EQ(bucket->Wait(), absl::OkStatus());
  return buckets[0]->result();
}

TEST(TcpEngineResult, DependsNeitherOnLanesNorOnChunks) {
  TcpOptions options = LoopbackAddresses(3);
  for (const WireType wire : {WireType::kSame, WireType::kBfloat16}) {
    options.wire = wire;
    options.lanes = 1;
    options.chunk_bytes = std::size_t{1} << 20;
    const std::vector<std::byte> expected = Reduce(options, DataType::kFloat32, 200'001);
    options.lanes = 3;
    options.chunk_bytes = 96 * 1024;
    EXPECT_EQ(Reduce(options, DataType::kFloat32, 200'001), expected);
  }
}

TEST(TcpEngineResult, ExactExchangesIgnoreTheWireType) {
  TcpOptions options = LoopbackAddresses(2);
  const std::vector<std::byte> expected = Reduce(options, DataType::kFloat32, 1000);
  options.wire = WireType::kBfloat16;
  EXPECT_NE(Reduce(options, DataType::kFloat32, 1000), expected);
  EXPECT_EQ(Reduce(options, DataType::kFloat32, 1000, /*exact=*/true), expected);
}

TEST(TcpEngineResult, SixteenBitWiresStayWithinTheirRounding) {
  constexpr std::uint32_t kNodes = 3;
  constexpr std::size_t kCount = 50'000;
  for (const WireType wire : {WireType::kBfloat16, WireType::kFloat16}) {
    // The largest relative rounding error: half a unit in the last place of 8 or 11 bits.
    const double unit = wire == WireType::kBfloat16 ? 0x1p-8 : 0x1p-11;
    TcpOptions options = LoopbackAddresses(kNodes);
    options.wire = wire;
    const auto engines = TcpCluster(options);
    std::vector<std::unique_ptr<EngineBucket>> buckets;
    for (std::uint32_t node = 0; node < kNodes; ++node) {
      buckets.push_back(std::make_unique<EngineBucket>(DataType::kFloat32, kCount, node));
      engines[node]->Submit(buckets.back()->exchange());
    }
    for (const auto& bucket : buckets) EXPECT_EQ(bucket->Wait(), absl::OkStatus());
    for (std::size_t i = 0; i < kCount; ++i) {
      double sum = 0, magnitude = 0;
      for (std::uint32_t node = 0; node < kNodes; ++node) {
        sum += TestValue(node, i, false);
        magnitude += std::fabs(TestValue(node, i, false));
      }
      // Each addend is rounded once, and so is the sum. float32's rounding adds less than 1 %.
      ASSERT_LE(std::fabs(buckets[0]->ResultAt(i) - sum),
                unit * (magnitude + std::fabs(sum)) * 1.01 + 1e-6)
          << i;
    }
  }
}

TEST(TcpEngineEnd, FinishedNodeMayEndBeforeTheOthersFinish) {
  for (int round = 0; round < 30; ++round) {
    TcpOptions options = LoopbackAddresses(2);
    options.chunk_bytes = 64 * 1024;
    auto engines = TcpCluster(options);
    std::vector<std::unique_ptr<EngineBucket>> first, last;
    for (std::uint32_t node = 0; node < 2; ++node) {
      first.push_back(std::make_unique<EngineBucket>(DataType::kFloat32, 100'000, node));
      last.push_back(std::make_unique<EngineBucket>(DataType::kFloat32, 300'000, node));
    }
    for (std::uint32_t node = 0; node < 2; ++node) {
      engines[node]->Submit(first[node]->exchange());
      engines[node]->Submit(last[node]->exchange());
    }
    ASSERT_EQ(first[round % 2]->Wait(), absl::OkStatus());
    ASSERT_EQ(last[round % 2]->Wait(), absl::OkStatus());
    engines[round % 2].reset();
    ASSERT_EQ(first[1 - round % 2]->Wait(), absl::OkStatus());
    ASSERT_EQ(last[1 - round % 2]->Wait(), absl::OkStatus());
    // Later exchanges fail, and the error names the node whose engine has ended.
    EngineBucket late(DataType::kFloat32, 100, 0);
    engines[1 - round % 2]->Submit(late.exchange());
    const auto status = late.Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(DetailsOf(*status).reason, "ENGINE_PEER_LOST") << *status;
    EXPECT_EQ(NodeOf(*status), round % 2 == 0 ? "node-0" : "node-1");
  }
}

TEST(TcpEngineEnd, DestructionFailsPendingExchangesOnEveryNode) {
  auto engines = TcpCluster(LoopbackAddresses(3));
  std::vector<std::unique_ptr<EngineBucket>> buckets;
  for (std::uint32_t node = 0; node < 3; ++node) {
    buckets.push_back(std::make_unique<EngineBucket>(DataType::kFloat32, 1'000'000, node));
  }
  // Node 2 does not take part, so no exchange can finish.
  engines[0]->Submit(buckets[0]->exchange());
  engines[1]->Submit(buckets[1]->exchange());
  engines[1].reset();
  const auto own = buckets[1]->Wait();
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(DetailsOf(*own).reason, "ENGINE_CLOSED");
  engines[2]->Submit(buckets[2]->exchange());
  for (const std::uint32_t node : {0, 2}) {
    const auto status = buckets[node]->Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(DetailsOf(*status).reason, "ENGINE_PEER_LOST") << *status;
    EXPECT_EQ(NodeOf(*status), "node-1");
  }
}

// 48 bytes for which nobody has asked. They ended the daemon when Gloo carried the data.
TEST(TcpEngineEnd, NodeThatSendsGarbageFailsTheEngineByName) {
  const std::uint64_t unasked[6] = {48 + 64, 1, 77, 0, 64, 0};
  for (const std::size_t channel : {0, 1, 2}) {
    MemoryStore store;
    TcpOptions options = LoopbackAddresses(2);
    options.store = &store;
    absl::StatusOr<std::unique_ptr<TcpEngine>> engine;
    std::thread node([&] { engine = TcpEngine::Connect(options); });
    const std::vector<std::string> lines =
        absl::StrSplit(store.Get("watch/0", absl::Seconds(60)).value(), '\n');
    PeerMeshOptions mesh;
    mesh.node = 1;
    mesh.nodes = 2;
    mesh.channels = 3;
    mesh.node_names = options.node_names;
    mesh.address = "127.0.0.1";
    mesh.agreement = lines[1];
    mesh.deadline_ns = MonotonicNowNs() + 60'000'000'000u;
    mesh.store = &store;
    auto peers = ConnectPeers(mesh);
    node.join();
    ASSERT_TRUE(peers.ok()) << peers.status();
    ASSERT_TRUE(engine.ok()) << engine.status();
    EngineBucket bucket(DataType::kFloat32, 2'000'000, 0);  // for both lanes
    (*engine)->Submit(bucket.exchange());
    // The watch, which is channel 0, waits for the rest of a frame that could be one.
    const std::string noise(64, '\xff');
    ASSERT_TRUE((channel == 0 ? (*peers)[0][0].Write(noise.data(), noise.size())
                              : (*peers)[channel][0].Write(unasked, sizeof(unasked)))
                    .ok());
    const auto status = bucket.Wait();
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(DetailsOf(*status).reason, channel == 0 ? "ENGINE_PEER_LOST" : "ENGINE_BROKEN")
        << *status;
    EXPECT_EQ(NodeOf(*status), "node-1") << *status;
  }
}

TEST(TcpEngineEnd, NodeWithSlowTrainersIsNotLost) {
  TcpOptions options = LoopbackAddresses(2);
  // Even a busy machine delays no thread by as much.
  options.silence_limit = absl::Seconds(3);
  const auto engines = TcpCluster(options);
  EngineBucket fast(DataType::kFloat32, 1'000'000, 0), slow(DataType::kFloat32, 1'000'000, 1);
  engines[0]->Submit(fast.exchange());
  EXPECT_FALSE(fast.done().Wait(std::chrono::milliseconds(5000)).has_value());
  engines[1]->Submit(slow.exchange());
  EXPECT_EQ(fast.Wait(), absl::OkStatus());
  EXPECT_EQ(slow.Wait(), absl::OkStatus());
}

TEST(TcpEngineEnd, AbortReachesEveryNodeWithinBounds) {
  for (int round = 0; round < 20; ++round) {
    TcpOptions options = LoopbackAddresses(3);
    options.chunk_bytes = 32 * 1024;
    auto engines = TcpCluster(options);
    std::vector<std::unique_ptr<EngineBucket>> buckets;
    for (std::uint32_t node = 0; node < 3; ++node) {
      for (int b = 0; b < 4; ++b) {
        buckets.push_back(std::make_unique<EngineBucket>(DataType::kFloat32, 400'000, node));
        engines[node]->Submit(buckets.back()->exchange());
      }
    }
    while (engines[0]->Statistics().lanes[0].chunks < static_cast<std::uint64_t>(round)) {
      std::this_thread::yield();
    }
    const std::uint64_t start_ns = MonotonicNowNs();
    engines[1]->Abort(absl::AbortedError("enough"));
    for (const auto& bucket : buckets) {
      const auto status = bucket->Wait();
      ASSERT_TRUE(status.has_value());
      if (!status->ok()) {
        EXPECT_EQ(status->message(), "enough") << *status;
      }
    }
    EXPECT_LT(MonotonicNowNs() - start_ns, 15'000'000'000u);
  }
}

}  // namespace
}  // namespace gradsync::daemon
