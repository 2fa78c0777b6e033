#include "daemon/engine/socket_owner.h"

#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "daemon/base/unique_fd.h"
#include "daemon/engine/local_address.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

// A connection of this process to itself. The families of its two sockets may differ: one that
// listens at "::" takes IPv4 too.
struct Connection {
  Connection(const std::string& listens_at, const std::string& called) {
    SocketAddress address = ParseAddress(listens_at, 0).value();
    auto* const any = reinterpret_cast<sockaddr*>(&address.storage);
    socklen_t size = sizeof(address.storage);
    listener = UniqueFd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    works = bind(listener.get(), any, address.length) == 0 && listen(listener.get(), 1) == 0 &&
            getsockname(listener.get(), any, &size) == 0;
    listening = TcpEnd::Of(address.storage);
    address = ParseAddress(called, listening.port).value();
    theirs = UniqueFd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    works = works && connect(theirs.get(), any, address.length) == 0;
    ours = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    works = works && ours.valid() &&
            getsockname(ours.get(), any, &(size = sizeof(address.storage))) == 0;
    our_end = TcpEnd::Of(address.storage);
    works = works && getpeername(ours.get(), any, &(size = sizeof(address.storage))) == 0;
    their_end = TcpEnd::Of(address.storage);
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
