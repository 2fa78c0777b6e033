#include "daemon/engine/socket_owner.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "daemon/base/unique_fd.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

sockaddr_storage AddressOf(const std::string& host, std::uint16_t port) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
  } else {
    EXPECT_EQ(inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr), 1) << host;
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
  }
  return address;
}

// A connection of this process to itself. The families of its two sockets may differ: one that
// listens at "::" takes IPv4 too.
struct Connection {
  Connection(const std::string& listens_at, const std::string& called) {
    sockaddr_storage address = AddressOf(listens_at, 0);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    listener = UniqueFd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    works = bind(listener.get(), any, SizeOf(address)) == 0 && listen(listener.get(), 1) == 0 &&
            getsockname(listener.get(), any, &size) == 0;
    listening = TcpEnd::Of(address);
    address = AddressOf(called, listening.port);
    theirs = UniqueFd(socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    works = works && connect(theirs.get(), any, SizeOf(address)) == 0;
    ours = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    works = works && ours.valid() && getsockname(ours.get(), any, &(size = sizeof(address))) == 0;
    our_end = TcpEnd::Of(address);
    works = works && getpeername(ours.get(), any, &(size = sizeof(address))) == 0;
    their_end = TcpEnd::Of(address);
  }
  static socklen_t SizeOf(const sockaddr_storage& address) {
    return address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  }

  UniqueFd listener, ours, theirs;
  TcpEnd listening, our_end, their_end;
  bool works = false;
};

struct Kind {
  std::string name;
  std::string listens_at;
  std::string called;
};

class SocketOwnerTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!CanFindOwners()) GTEST_SKIP() << "this kernel has no sock_diag for TCP";
    if (!connection_.works) GTEST_SKIP() << "this machine has no such addresses";
  }
  Connection connection_{GetParam().listens_at, GetParam().called};
};

INSTANTIATE_TEST_SUITE_P(Of, SocketOwnerTest,
                         testing::Values(Kind{"Ipv4", "127.0.0.1", "127.0.0.1"},
                                         Kind{"Ipv6", "::1", "::1"},
                                         Kind{"Ipv4AtIpv6", "::", "127.0.0.1"},
                                         Kind{"MappedIpv4", "::", "::ffff:127.0.0.1"}),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(SocketOwnerTest, BothEndsAreThisUsers) {
  EXPECT_EQ(OwnerOf(connection_.their_end, connection_.our_end), getuid());
  EXPECT_EQ(OwnerOf(connection_.our_end, connection_.their_end), getuid());
}

TEST_P(SocketOwnerTest, ASocketThatWasClosedHasNoOwner) {
  connection_.theirs = UniqueFd();
  EXPECT_EQ(OwnerOf(connection_.their_end, connection_.our_end), std::nullopt);
}

TEST_P(SocketOwnerTest, ASocketThatListensIsNotConnected) {
  TcpEnd stranger = connection_.their_end;
  stranger.port = 1;
  EXPECT_EQ(OwnerOf(connection_.our_end, stranger), std::nullopt);
  EXPECT_EQ(OwnerOf(stranger, connection_.our_end), std::nullopt);
}

}  // namespace
}  // namespace gradsync::daemon
