// A stranger on another node connects to every port of a daemon while a job runs there.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kit/deadline.h"
#include "tests/network/networked_nodes.h"

namespace gradsync::fault {
namespace {

std::string PortScan() { return ""; }
std::string Web() { return "GET / HTTP/1.1\r\nHost: x\r\n\r\n"; }
std::string TlsHello() { return std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11); }
std::string Noise() {
  std::string bytes(100'000, '\0');
  std::uint32_t state = 1;
  for (char& byte : bytes) byte = static_cast<char>((state = state * 1664525 + 1013904223) >> 24);
  return bytes;
}
// A valid start of HTTP/2, then a frame of 16 MiB of an unknown kind.
std::string BrokenHttp2() {
  return std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + "\xff\xff\xff\x77\x77" + "garbage";
}

// Connects. The descriptor is invalid if the connection is refused.
Descriptor Connect(const std::string& address, std::uint16_t port) {
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, address.c_str(), &to.sin_addr), 1);
  const timeval patience{kPatienceMs / 1000, 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) return Descriptor();
  return fd;
}

// TCP ports with a listener in the network of the calling thread.
std::vector<std::uint16_t> ListeningPorts() {
  std::vector<std::uint16_t> ports;
  for (const char* path : {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"}) {
    std::ifstream table(path);
    for (std::string line; std::getline(table, line);) {
      unsigned int port = 0;
      unsigned int state = 0;
      if (std::sscanf(line.c_str(), "%*d: %*[0-9A-F]:%X %*[0-9A-F]:%*X %X", &port, &state) == 2 &&
          state == TCP_LISTEN) {
        ports.push_back(static_cast<std::uint16_t>(port));
      }
    }
  }
  return ports;
}

class StrangerTest : public testing::Test {
 protected:
  std::uint16_t PeerPort(int node) {
    const std::string address = nodes_.daemon(node).Status().peer_address();
    return static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  }

  // From node 2, which has no ranks.
  template <class Act>
  void FromElsewhere(const Act& act) {
    std::thread([&] {
      const absl::Status status = nodes_.network().Enter(2);
      EXPECT_TRUE(status.ok()) << status;
      act();
    }).join();
  }

  // If a node has a network of its own, all its ports belong to the daemon.
  std::vector<std::uint16_t> Ports(int node) {
    if (!nodes_.real()) return {PeerPort(node)};
    std::vector<std::uint16_t> ports;
    std::thread([&] {
      EXPECT_TRUE(nodes_.network().Enter(node).ok());
      ports = ListeningPorts();
    }).join();
    return ports;
  }

  // One connection of each kind to each port of the node.
  void SayGarbage(int node) {
    const std::vector<std::uint16_t> ports = Ports(node);
    EXPECT_FALSE(ports.empty());
    FromElsewhere([&] {
      for (const std::uint16_t port : ports) {
        for (const std::string& said : {PortScan(), Web(), TlsHello(), Noise(), BrokenHttp2()}) {
          const Descriptor fd = Connect(nodes_.network().address(node), port);
          ASSERT_GE(fd.get(), 0) << "port " << port;
          (void)send(fd.get(), said.data(), said.size(), MSG_NOSIGNAL);
        }
      }
    });
  }

  NetworkedNodes nodes_{3};
};

TEST_F(StrangerTest, GarbageEndsOnlyItsOwnConnection) {
  const Trainers trainers = nodes_.JoinOn(2);
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step");
  std::atomic<bool> said_all{false};
  std::thread stranger([&] {
    for (const int node : {0, 1}) SayGarbage(node);
    said_all = true;
  });
  // Steps run while garbage arrives, and afterwards.
  while (!said_all) ExpectAll(trainers, "step times=10");
  stranger.join();
  ExpectAll(trainers, "step times=10");
  for (const int node : {0, 1}) EXPECT_TRUE(nodes_.daemon(node).process().running());
}

TEST_F(StrangerTest, SilentConnectionsDelayNoOne) {
  std::vector<Descriptor> silent;
  const std::uint16_t port = PeerPort(0);
  FromElsewhere([&] {
    for (int i = 0; i < 200; ++i) {
      silent.push_back(Connect(nodes_.network().address(0), port));
      ASSERT_GE(silent.back().get(), 0) << i;
    }
  });
  const Trainers trainers = nodes_.JoinOn(2);
  ExpectAll(trainers, "register buckets=2 count=1000");
  ExpectAll(trainers, "step times=10");
}

}  // namespace
}  // namespace gradsync::fault
