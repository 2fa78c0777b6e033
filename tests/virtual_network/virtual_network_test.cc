#include "tools/virtual_network/virtual_network.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kit/child_process.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

// Runs `act` on the node, as a thread of its own.
void On(const VirtualNetwork& network, int node, const std::function<void()>& act) {
  std::thread([&] {
    const absl::Status status = network.Enter(node);
    EXPECT_TRUE(status.ok()) << status;
    if (status.ok()) act();
  }).join();
}

sockaddr_in AddressOf(const VirtualNetwork& network, int node) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, network.address(node).c_str(), &address.sin_addr), 1);
  return address;
}

// Both ends of a connection. Nothing blocks for ever on them.
struct Connection {
  daemon::UniqueFd from, to;
};

// Has no ends if no packet gets through.
Connection Connect(const VirtualNetwork& network, int from, int to) {
  daemon::UniqueFd listener;
  sockaddr_in address = AddressOf(network, to);
  On(network, to, [&] {
    listener = daemon::UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0)
        << std::strerror(errno);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  });
  Connection connection;
  On(network, from, [&] {
    daemon::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval patience{kPatienceMs / 1000, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
      connection.to = daemon::UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      setsockopt(connection.to.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
      connection.from = std::move(fd);
    }
  });
  return connection;
}

TEST(VirtualNetwork, EveryNodeReachesEveryOther) {
  for (const bool loopback : {false, true}) {
    const VirtualNetwork network({3, 0, loopback});
    std::printf("%s\n", network.description().c_str());
    for (int from = 0; from < network.nodes(); ++from) {
      for (int to = 0; to < network.nodes(); ++to) {
        const Connection connection = Connect(network, from, to);
        ASSERT_TRUE(connection.from.valid()) << from << " to " << to;
        ASSERT_EQ(send(connection.from.get(), "x", 1, MSG_NOSIGNAL), 1);
        char received = 0;
        EXPECT_EQ(recv(connection.to.get(), &received, 1, 0), 1);
        EXPECT_EQ(received, 'x');
      }
    }
  }
}

TEST(VirtualNetwork, LoopbackSaysSo) {
  VirtualNetwork network({2, 1'000'000'000, true});
  EXPECT_EQ(network.kind(), VirtualNetwork::Kind::kLoopback);
  EXPECT_NE(network.description().find("loopback addresses"), std::string::npos);
  EXPECT_EQ(network.address(0), "127.0.0.1");
  EXPECT_EQ(network.address(1), "127.0.0.2");
  EXPECT_TRUE(network.CommandPrefix(1).empty());
  EXPECT_EQ(network.SetLink(1, false).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(network.SetIsolated(1, true).code(), absl::StatusCode::kUnimplemented);
}

// Loopback addresses can neither separate nodes, nor keep a rate, nor pull a cable: such tests need
// namespaces.
class Namespaces : public testing::Test {
 protected:
  void Make(int nodes, std::uint64_t bits_per_second = 0) {
    network_ = std::make_unique<VirtualNetwork>(VirtualNetworkOptions{nodes, bits_per_second});
    if (network_->kind() != VirtualNetwork::Kind::kNamespaces) {
      GTEST_SKIP() << network_->description();
    }
  }

  std::unique_ptr<VirtualNetwork> network_;
};

TEST_F(Namespaces, NodesHaveAddressesOfTheirOwn) {
  Make(2);
  if (IsSkipped()) return;
  EXPECT_EQ(network_->description(), "2 network namespaces");
  const sockaddr_in other = AddressOf(*network_, 1);
  On(*network_, 0, [&] {
    const daemon::UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_NE(bind(fd.get(), reinterpret_cast<const sockaddr*>(&other), sizeof(other)), 0);
    EXPECT_EQ(errno, EADDRNOTAVAIL);
  });
}

TEST_F(Namespaces, APrefixedCommandRunsOnTheNode) {
  Make(2);
  if (IsSkipped()) return;
  ChildOptions child;
  child.arguments = network_->CommandPrefix(1);
  // The table of local addresses.
  for (const char* word : {"/bin/grep", "-q", "10.99.0.2", "/proc/self/net/fib_trie"}) {
    child.arguments.emplace_back(word);
  }
  const auto status = ChildProcess(child).Wait(kPatienceMs);
  EXPECT_EQ(status, 0);
}

TEST_F(Namespaces, TheRateIsKept) {
  constexpr std::uint64_t kRate = 200'000'000;
  constexpr std::size_t kBytes = 10'000'000;  // 0.4 s of it
  Make(2, kRate);
  if (IsSkipped()) return;
  EXPECT_EQ(network_->description(), "2 network namespaces, links of 200mbit");
  const Connection connection = Connect(*network_, 0, 1);
  ASSERT_TRUE(connection.from.valid());
  const std::uint64_t start_ns = NowNs();
  std::thread sender([&] {
    const std::string bytes(kBytes, 'x');
    EXPECT_EQ(send(connection.from.get(), bytes.data(), kBytes, MSG_NOSIGNAL),
              static_cast<ssize_t>(kBytes));
  });
  std::vector<char> received(kBytes);
  EXPECT_EQ(recv(connection.to.get(), received.data(), kBytes, MSG_WAITALL),
            static_cast<ssize_t>(kBytes));
  const double seconds = static_cast<double>(NowNs() - start_ns) * 1e-9;
  sender.join();
  const double rate = static_cast<double>(kBytes) * 8 / seconds;
  // 4 ms of it, 1 % of all, pass at once; headers take 3 %.
  EXPECT_LT(rate, 1.02 * static_cast<double>(kRate));
}

// Sends a byte that must not arrive. The kernel gives up the connection soon when nothing is
// acknowledged.
void SendInVain(const Connection& connection) {
  const unsigned int patience_ms = 200;
  ASSERT_EQ(setsockopt(connection.from.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &patience_ms,
                       sizeof(patience_ms)),
            0);
  ASSERT_EQ(send(connection.from.get(), "x", 1, MSG_NOSIGNAL), 1);
  char received = 0;
  EXPECT_EQ(recv(connection.from.get(), &received, 1, 0), -1);
  EXPECT_TRUE(errno == ETIMEDOUT || errno == EHOSTUNREACH) << std::strerror(errno);
  EXPECT_EQ(recv(connection.to.get(), &received, 1, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(Namespaces, APulledCableLosesPacketsUntilItIsPluggedInAgain) {
  Make(3);
  if (IsSkipped()) return;
  const Connection connection = Connect(*network_, 0, 1);
  ASSERT_TRUE(connection.from.valid());
  ASSERT_TRUE(network_->SetLink(1, false).ok());
  SendInVain(connection);

  EXPECT_TRUE(Connect(*network_, 0, 2).from.valid()) << "the others' cables are plugged in";
  ASSERT_TRUE(network_->SetLink(1, true).ok());
  EXPECT_TRUE(Connect(*network_, 0, 1).from.valid());
}

TEST_F(Namespaces, IsolatedNodesReachAllButEachOther) {
  Make(3);
  if (IsSkipped()) return;
  const Connection connection = Connect(*network_, 1, 2);
  ASSERT_TRUE(connection.from.valid());
  for (const int node : {1, 2}) ASSERT_TRUE(network_->SetIsolated(node, true).ok());
  SendInVain(connection);

  for (const int node : {1, 2}) {
    EXPECT_TRUE(Connect(*network_, 0, node).from.valid()) << node;
    EXPECT_TRUE(Connect(*network_, node, 0).from.valid()) << node;
  }
  for (const int node : {1, 2}) ASSERT_TRUE(network_->SetIsolated(node, false).ok());
  EXPECT_TRUE(Connect(*network_, 1, 2).from.valid());
}

}  // namespace
}  // namespace gradsync
