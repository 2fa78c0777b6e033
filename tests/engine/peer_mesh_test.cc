#include "daemon/engine/peer_mesh.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/base/clock.h"
#include "daemon/base/error.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/peer_hello.h"
#include "daemon/engine/peer_tls.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/engine/stored_peer.h"
#include "tests/engine/memory_store.h"
#include "tests/engine/test_certificates.h"
#include "tests/kit/child_process.h"
#include "tests/kit/connect.h"
#include "tests/kit/flood.h"
#include "tests/kit/soon.h"

namespace gradsync::daemon {
namespace {

using Mesh = absl::StatusOr<std::vector<std::vector<PeerStream>>>;

// What a node has stored that listens nowhere.
std::string Elsewhere() {
  return EncodeStoredPeer("127.0.0.1", 1, std::string(kPeerTokenBytes, 'x'), "lanes=2");
}

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

// A connection's first bytes, or "" if it ends.
std::string Hear(PeerStream* stream, std::size_t bytes) {
  std::string heard(bytes, '\0');
  for (std::size_t have = 0; have < bytes;) {
    const absl::StatusOr<std::size_t> got = stream->Read(heard.data() + have, bytes - have);
    if (!got.ok()) return "";
    have += *got;
    pollfd readable = {stream->fd(), POLLIN, 0};
    if (*got == 0 && poll(&readable, 1, 60'000) != 1) return "";
  }
  return heard;
}

void ExpectEveryPairTalks(std::vector<Mesh>* meshes, std::uint32_t channels) {
  const auto nodes = static_cast<std::uint32_t>(meshes->size());
  for (std::uint32_t a = 0; a < nodes; ++a) {
    ASSERT_TRUE((*meshes)[a].ok()) << (*meshes)[a].status();
    ASSERT_EQ((*meshes)[a]->size(), channels);
    for (std::uint32_t channel = 0; channel < channels; ++channel) {
      auto& peers = (*(*meshes)[a])[channel];
      EXPECT_FALSE(peers[a].valid());
      for (std::uint32_t b = 0; b < nodes; ++b) {
        if (a == b) continue;
        const char said[3] = {static_cast<char>(a), static_cast<char>(b),
                              static_cast<char>(channel)};
        ASSERT_EQ(*peers[b].Write(said, 3), 3u);
      }
    }
  }
  for (std::uint32_t a = 0; a < nodes; ++a) {
    for (std::uint32_t b = 0; b < nodes; ++b) {
      for (std::uint32_t channel = 0; a != b && channel < channels; ++channel) {
        const std::string expected = {static_cast<char>(a), static_cast<char>(b),
                                      static_cast<char>(channel)};
        EXPECT_EQ(Hear(&(*(*meshes)[b])[channel][a], 3), expected);
      }
    }
  }
}

TEST(PeerMesh, ConnectsEveryPairOfNodesOnEveryChannel) {
  constexpr std::uint32_t kNodes = 5;
  MemoryStore store;
  std::vector<PeerMeshOptions> options;
  for (std::uint32_t node = 0; node < kNodes; ++node) {
    options.push_back(Options(node, kNodes, &store));
    options.back().channels = 3;
  }
  std::vector<Mesh> meshes = ConnectAll(options);
  ExpectEveryPairTalks(&meshes, 3);
}

TEST(PeerMesh, OnlyHoldersOfACertificateConnectWithTls) {
  const TestCertificates ours, theirs;
  const auto tls = PeerTls::Make(ours.keys());
  ASSERT_TRUE(tls.ok()) << tls.status();
  {
    MemoryStore store;
    std::vector<PeerMeshOptions> options;
    for (std::uint32_t node = 0; node < 3; ++node) {
      options.push_back(Options(node, 3, &store));
      options.back().channels = 2;
      options.back().tls = *tls;
    }
    std::vector<Mesh> meshes = ConnectAll(options);
    ExpectEveryPairTalks(&meshes, 2);
  }
  // Each of these knows the secret.
  const auto other = PeerTls::Make(theirs.keys());
  ASSERT_TRUE(other.ok()) << other.status();
  for (const std::shared_ptr<PeerTls>& shown : {std::shared_ptr<PeerTls>(), *other}) {
    MemoryStore store;
    std::vector<PeerMeshOptions> options = {Options(0, 2, &store), Options(1, 2, &store)};
    options[0].deadline_ns = options[1].deadline_ns = MonotonicNowNs() + 3'000'000'000u;
    options[0].tls = *tls;
    options[1].tls = shown;
    const std::vector<Mesh> meshes = ConnectAll(options);
    EXPECT_EQ(DetailsOf(meshes[0].status()).reason, "ENGINE_TIMEOUT") << meshes[0].status();
    EXPECT_FALSE(meshes[1].ok());
  }
}

TEST(PeerMesh, UnusableCertificateIsNamed) {
  const TestCertificates certificates;
  const auto message = [&](void (*change)(PeerTlsKeys*)) {
    PeerTlsKeys keys = certificates.keys();
    change(&keys);
    return std::string(PeerTls::Make(keys).status().message());
  };
  EXPECT_EQ(message([](PeerTlsKeys* k) { k->certificate = "x"; }),
            "peer_tls_certificate cannot be used for TLS");
  EXPECT_EQ(message([](PeerTlsKeys* k) { k->key = k->ca; }), "peer_tls_key cannot be used for TLS");
  EXPECT_EQ(message([](PeerTlsKeys* k) { k->ca = k->key; }), "peer_tls_ca cannot be used for TLS");
  EXPECT_EQ(message([](PeerTlsKeys* k) { k->key = TestCertificates().keys().key; }),
            "peer_tls_key is not the key of peer_tls_certificate");
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

TEST(PeerMesh, NamesTheNodeThatHasStoredNoAddress) {
  for (const char* const value : {"", "127.0.0.1 1 00\nlanes=2", "nowhere 1 00\nlanes=2"}) {
    MemoryStore store;
    ASSERT_TRUE(store.Set("watch/1", value).ok());
    const Mesh mesh = ConnectPeers(Options(0, 2, &store));
    EXPECT_TRUE(absl::IsUnavailable(mesh.status())) << mesh.status();
    EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-1")) << mesh.status();
  }
}

TEST(PeerMesh, SettingsOfAnotherNodeAreShownAsPrintableText) {
  MemoryStore store;
  const std::string settings = "\xff\n" + std::string(4000, 'x');
  ASSERT_TRUE(store
                  .Set("watch/1", EncodeStoredPeer("127.0.0.1", 1,
                                                   std::string(kPeerTokenBytes, 'x'), settings))
                  .ok());
  const Mesh mesh = ConnectPeers(Options(0, 2, &store));
  EXPECT_TRUE(absl::IsFailedPrecondition(mesh.status())) << mesh.status();
  EXPECT_TRUE(absl::StrContains(mesh.status().message(), R"(node-1 has \xff\nxxx)"))
      << mesh.status();
  EXPECT_LT(mesh.status().message().size(), 500u);
}

TEST(PeerMesh, NamesTheNodeThatDoesNotConnect) {
  MemoryStore store;
  PeerMeshOptions options = Options(0, 2, &store);
  options.deadline_ns = MonotonicNowNs() + 100'000'000;
  ASSERT_TRUE(store.Set("watch/1", Elsewhere()).ok());
  const Mesh mesh = ConnectPeers(options);
  EXPECT_EQ(DetailsOf(mesh.status()).reason, "ENGINE_TIMEOUT");
  EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-1"));
}

TEST(PeerMesh, GivesUpWhenTheStoreIsCancelled) {
  MemoryStore store;
  ASSERT_TRUE(store.Set("watch/1", Elsewhere()).ok());
  Mesh mesh;
  std::thread connects([&] { mesh = ConnectPeers(Options(0, 2, &store)); });
  ASSERT_TRUE(store.Get("watch/0", absl::Seconds(10)).ok());
  const std::uint64_t cancelled_ns = MonotonicNowNs();
  store.Cancel(absl::AbortedError("node-1 was lost"));
  connects.join();
  EXPECT_EQ(mesh.status(), absl::AbortedError("node-1 was lost"));
  EXPECT_LT(MonotonicNowNs() - cancelled_ns, 30'000'000'000u);
}

// A node with TLS answers one without by an alert.
TEST(PeerMesh, TakesNoOtherAnswerForAWelcome) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress any = ParseAddress("127.0.0.1", 0).value();
  ASSERT_EQ(bind(listener.get(), any.get(), any.length), 0);
  ASSERT_EQ(listen(listener.get(), SOMAXCONN), 0);
  MemoryStore store;
  ASSERT_TRUE(store
                  .Set("watch/0", EncodeStoredPeer("127.0.0.1", LocalPort(listener.get()),
                                                   std::string(kPeerTokenBytes, 'x'), "lanes=2"))
                  .ok());
  std::vector<UniqueFd> answered;
  std::thread answers([&] {
    for (;;) {
      UniqueFd connection(accept(listener.get(), nullptr, nullptr));
      if (!connection.valid()) return;
      send(connection.get(), "\x15", 1, MSG_NOSIGNAL);
      answered.push_back(std::move(connection));
    }
  });
  const Mesh mesh = ConnectPeers(Options(1, 2, &store));
  shutdown(listener.get(), SHUT_RDWR);
  answers.join();
  EXPECT_EQ(DetailsOf(mesh.status()).reason, "ENGINE_PEER_LOST") << mesh.status();
  EXPECT_TRUE(absl::StrContains(mesh.status().message(), "node-0")) << mesh.status();
  EXPECT_GT(answered.size(), 1u) << "the node tries again";
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
  const std::string wrong(40, 'x');
  ASSERT_EQ(send(strangers[1].get(), wrong.data(), wrong.size(), 0), 40);
  strangers[2].reset();
  ASSERT_EQ(send(strangers[3].get(), wrong.data(), 7, 0), 7);
  const Mesh second = ConnectPeers(Options(1, 2, &store));
  node.join();
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(second.ok()) << second.status();
  char closed = 0;
  EXPECT_LE(recv(strangers[1].get(), &closed, 1, 0), 0);
  // The port is closed, now that every node has connected.
  const UniqueFd late(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_NE(connect(late.get(), address.get(), address.length), 0);
}

TEST(PeerMesh, CrowdOfStrangersKeepsNoNodeOut) {
  MemoryStore store;
  Mesh first = absl::UnknownError("");
  std::thread node([&] { first = ConnectPeers(Options(0, 2, &store)); });
  const std::string value = store.Get("watch/0", absl::Seconds(60)).value();
  const std::vector<std::string> words = absl::StrSplit(value, absl::ByAnyChar(" \n"));
  std::uint32_t port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(words[1], &port));
  const SocketAddress address = ParseAddress(words[0], static_cast<std::uint16_t>(port)).value();
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 300; ++i) {
    crowd.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(crowd.back().get(), address.get(), address.length), 0) << i;
  }
  const Mesh second = ConnectPeers(Options(1, 2, &store));
  node.join();
  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(second.ok()) << second.status();
}

// Where this node listens, "host:port".
std::string ListenerOf(MemoryStore* store, std::uint32_t node) {
  const std::string value = store->Get(absl::StrCat("watch/", node), absl::Seconds(60)).value();
  const std::vector<std::string> words = absl::StrSplit(value, absl::ByAnyChar(" \n"));
  return absl::StrCat(words[0], ":", words[1]);
}

// Three nodes meet, and a stranger floods the ports of two of them all the while.
void ExpectNodesMeetInAFlood(const std::shared_ptr<PeerTls>& tls) {
  if (!CanFindOwners()) GTEST_SKIP() << "the kernel does not say who a local caller is";
  MemoryStore store;
  std::vector<PeerMeshOptions> options;
  for (std::uint32_t node = 0; node < 3; ++node) {
    options.push_back(Options(node, 3, &store));
    options.back().channels = 3;
    options.back().tls = tls;
  }
  std::vector<Mesh> meshes(3);
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Flood>> floods;
  // A node accepts nobody before every node has stored its address.
  for (std::uint32_t node = 0; node < 3; ++node) {
    if (node == 2) {
      for (const auto& flood : floods) {
        EXPECT_TRUE(Soon([&] { return flood->made() >= Flood::kConnections; }));
      }
    }
    threads.emplace_back([&, node] { meshes[node] = ConnectPeers(options[node]); });
    if (node < 2) floods.push_back(std::make_unique<Flood>(ListenerOf(&store, node)));
  }
  for (std::thread& thread : threads) thread.join();
  ExpectEveryPairTalks(&meshes, 3);
}

TEST(PeerMesh, NodesMeetWhileAStrangerFloodsTheirPorts) { ExpectNodesMeetInAFlood(nullptr); }

// A handshake takes round trips, in which a crowd can come.
TEST(PeerMesh, NodesMeetWithTlsWhileAStrangerFloodsTheirPorts) {
  const TestCertificates certificates;
  const auto tls = PeerTls::Make(certificates.keys());
  ASSERT_TRUE(tls.ok()) << tls.status();
  ExpectNodesMeetInAFlood(*tls);
}

// The test plays node 1, which is slow.
TEST(PeerMesh, CrowdOfOneCallerClosesNoOtherCallersConnection) {
  if (!CanFindOwners()) GTEST_SKIP() << "the kernel does not say who a local caller is";
  MemoryStore store;
  ASSERT_TRUE(store.Set("watch/1", Elsewhere()).ok());
  Mesh mesh = absl::UnknownError("");
  std::thread node([&] { mesh = ConnectPeers(Options(0, 2, &store)); });
  const std::string listener = ListenerOf(&store, 0);
  const Descriptor slow = ConnectTcp(listener);
  std::vector<Descriptor> crowd;
  for (int i = 0; i < 120; ++i) crowd.push_back(ConnectTcp(listener, Flood::kAddress));
  // Too many have come when one of the crowd is closed that was not among the first.
  char byte = 0;
  EXPECT_LE(recv(crowd[40].get(), &byte, 1, 0), 0);
  const StoredPeer stored =
      DecodeStoredPeer(store.Get("watch/0", absl::Seconds(1)).value()).value();
  const std::string hello = EncodePeerHello(stored.token, {1, 0});
  EXPECT_EQ(send(slow.get(), hello.data(), hello.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(hello.size()));
  EXPECT_EQ(recv(slow.get(), &byte, 1, 0), 1) << "it is welcome";
  store.Cancel(absl::AbortedError("the test has ended"));
  node.join();
  EXPECT_TRUE(mesh.ok()) << mesh.status();
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
