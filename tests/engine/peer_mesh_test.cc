#include "daemon/engine/peer_mesh.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/local_address.h"
#include "tests/engine/memory_store.h"

namespace gradsync::daemon {
namespace {

using Mesh = absl::StatusOr<std::vector<UniqueFd>>;

PeerMeshOptions Options(std::uint32_t node, std::uint32_t nodes, RendezvousStore* store) {
  PeerMeshOptions options;
  options.node = node;
  options.nodes = nodes;
  for (std::uint32_t n = 0; n < nodes; ++n) options.node_names.push_back(absl::StrCat("node-", n));
  options.address = "127.0.0.1";
  options.agreement = "lanes=2";
  options.deadline_ns = MonotonicNowNs() + 60'000'000'000u;
  options.store = store;
  return options;
}

std::vector<Mesh> ConnectAll(const std::vector<PeerMeshOptions>& options) {
  std::vector<Mesh> meshes(options.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < options.size(); ++i) {
    threads.emplace_back([&, i] { meshes[i] = ConnectPeers(options[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  return meshes;
}

TEST(PeerMesh, ConnectsEveryPairOfNodes) {
  constexpr std::uint32_t kNodes = 5;
  MemoryStore store;
  std::vector<PeerMeshOptions> options;
  for (std::uint32_t node = 0; node < kNodes; ++node) {
    options.push_back(Options(node, kNodes, &store));
  }
  std::vector<Mesh> meshes = ConnectAll(options);
  for (std::uint32_t a = 0; a < kNodes; ++a) {
    ASSERT_TRUE(meshes[a].ok()) << meshes[a].status();
    EXPECT_FALSE((*meshes[a])[a].valid());
    for (std::uint32_t b = 0; b < kNodes; ++b) {
      if (a == b) continue;
      const char said[2] = {static_cast<char>(a), static_cast<char>(b)};
      ASSERT_EQ(send((*meshes[a])[b].get(), said, 2, 0), 2);
    }
  }
  for (std::uint32_t a = 0; a < kNodes; ++a) {
    for (std::uint32_t b = 0; b < kNodes; ++b) {
      if (a == b) continue;
      char heard[2] = {};
      pollfd readable = {(*meshes[b])[a].get(), POLLIN, 0};
      ASSERT_EQ(poll(&readable, 1, 60'000), 1);
      ASSERT_EQ(recv((*meshes[b])[a].get(), heard, 2, 0), 2);
      EXPECT_EQ(heard[0], static_cast<char>(a));
      EXPECT_EQ(heard[1], static_cast<char>(b));
    }
  }
}

TEST(PeerMesh, NamesTheNodeWithDifferentSettings) {
  MemoryStore store;
  std::vector<PeerMeshOptions> options = {Options(0, 2, &store), Options(1, 2, &store)};
  options[1].agreement = "lanes=4";
  options[0].deadline_ns = options[1].deadline_ns = MonotonicNowNs() + 5'000'000'000u;
  const std::vector<Mesh> meshes = ConnectAll(options);
  for (const Mesh& mesh : meshes) {
    EXPECT_EQ(mesh.status().code(), absl::StatusCode::kFailedPrecondition) << mesh.status();
    EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-1 has lanes=4") ||
                absl::StrContains(mesh.status().message(), "node-0 has lanes=2"))
        << mesh.status();
  }
}

TEST(PeerMesh, NamesTheNodeWithoutAnAddress) {
  MemoryStore store;
  PeerMeshOptions options = Options(0, 2, &store);
  options.deadline_ns = MonotonicNowNs() + 50'000'000;
  const Mesh mesh = ConnectPeers(options);
  EXPECT_EQ(mesh.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(DetailsOf(mesh.status()).reason, "ENGINE_TIMEOUT");
  EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-1"));
}

TEST(PeerMesh, NamesTheNodeThatDoesNotConnect) {
  MemoryStore store;
  PeerMeshOptions options = Options(0, 2, &store);
  options.deadline_ns = MonotonicNowNs() + 100'000'000;
  ASSERT_TRUE(store.Set("watch/1", "127.0.0.1 1 00\nlanes=2").ok());
  const Mesh mesh = ConnectPeers(options);
  EXPECT_EQ(DetailsOf(mesh.status()).reason, "ENGINE_TIMEOUT");
  EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-1"));
}

TEST(PeerMesh, GivesUpWhenTheStoreIsCancelled) {
  MemoryStore store;
  ASSERT_TRUE(store.Set("watch/1", "127.0.0.1 1 00\nlanes=2").ok());
  Mesh mesh;
  std::thread connects([&] { mesh = ConnectPeers(Options(0, 2, &store)); });
  ASSERT_TRUE(store.Get("watch/0", absl::Seconds(10)).ok());
  const std::uint64_t cancelled_ns = MonotonicNowNs();
  store.Cancel(absl::AbortedError("node-1 was lost"));
  connects.join();
  EXPECT_EQ(mesh.status(), absl::AbortedError("node-1 was lost"));
  EXPECT_LT(MonotonicNowNs() - cancelled_ns, 30'000'000'000u);
}

TEST(PeerMesh, ClosesConnectionsWithoutTheToken) {
  MemoryStore store;
  Mesh first = absl::UnknownError("");
  std::thread node([&] { first = ConnectPeers(Options(0, 2, &store)); });
  const std::string value = store.Get("watch/0", absl::Seconds(60)).value();
  const std::vector<std::string> words = absl::StrSplit(value, absl::ByAnyChar(" \n"));
  std::uint32_t port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(words[1], &port));
  const SocketAddress address = ParseAddress(words[0], static_cast<std::uint16_t>(port)).value();
  // One connection sends nothing, one sends a wrong token, one closes, one sends half of the token.
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(strangers.back().get(), address.get(), address.length), 0);
  }
  const std::string wrong(20, 'x');
  ASSERT_EQ(send(strangers[1].get(), wrong.data(), wrong.size(), 0), 20);
  strangers[2].reset();
  ASSERT_EQ(send(strangers[3].get(), wrong.data(), 7, 0), 7);
  const Mesh second = ConnectPeers(Options(1, 2, &store));
  node.join();
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(second.ok()) << second.status();
  char closed = 0;
  EXPECT_LE(recv(strangers[1].get(), &closed, 1, 0), 0);
}

TEST(LocalAddress, ResolvesNamesNumbersAndInterfaces) {
  EXPECT_EQ(LocalAddress("127.0.0.1", "").value(), "127.0.0.1");
  EXPECT_EQ(LocalAddress("", "lo").value(), "127.0.0.1");
  EXPECT_TRUE(LocalAddress("localhost", "").ok());
  EXPECT_EQ(LocalAddress("", "").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LocalAddress("", "no-such-interface").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LocalAddress("no.such.host.invalid", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LocalAddress("192.0.2.1", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ParseAddress("localhost", 1).ok());
}

}  // namespace
}  // namespace gradsync::daemon
