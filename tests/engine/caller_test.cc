#include "daemon/engine/caller.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/unique_fd.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/socket_owner.h"

namespace gradsync::daemon {
namespace {

using Ip = std::array<std::uint8_t, 16>;

Ip IpOf(const std::string& host) { return TcpEnd::Of(ParseAddress(host, 1).value().storage).ip; }

TEST(CallerKeyOf, AnAddressOfAnotherMachineIsACaller) {
  const Ip first = IpOf("10.0.0.1"), second = IpOf("10.0.0.2");
  EXPECT_EQ(CallerKeyOf(first, {}), CallerKeyOf(first, {}));
  EXPECT_NE(CallerKeyOf(first, {}), CallerKeyOf(second, {}));
}

TEST(CallerKeyOf, AUserOfThisMachineIsOneCallerWhateverItsAddress) {
  const std::uint32_t user = geteuid() + 1;
  const Ip first = IpOf("127.0.0.1"), second = IpOf("127.0.0.2");
  EXPECT_EQ(CallerKeyOf(first, {true, user}), CallerKeyOf(second, {true, user}));
  EXPECT_NE(CallerKeyOf(first, {true, user}), CallerKeyOf(first, {true, user + 1}));
  EXPECT_NE(CallerKeyOf(first, {true, user}), CallerKeyOf(first, {}));
  EXPECT_EQ(CallerKeyOf(first, {true, std::nullopt}), CallerKeyOf(second, {true, std::nullopt}))
      << "all unknown users are one caller";
}

TEST(CallerKeyOf, AUserWhoMayRunADaemonIsACallerAtEachAddress) {
  const Ip first = IpOf("127.0.0.1"), second = IpOf("127.0.0.2");
  for (const std::uint32_t user : {0u, static_cast<std::uint32_t>(geteuid())}) {
    EXPECT_NE(CallerKeyOf(first, {true, user}), CallerKeyOf(second, {true, user}));
    EXPECT_EQ(CallerKeyOf(first, {true, user}), CallerKeyOf(first, {true, user}));
  }
}

CallerKey Remote(const std::string& host) { return CallerKeyOf(IpOf(host), {}); }

TEST(NetworkOf, AnIpv6AddressCountsByItsFirstBytes) {
  const CallerKey network = NetworkOf(Remote("2001:db8:1:2::1"));
  EXPECT_EQ(network, NetworkOf(Remote("2001:db8:1:2:ffff::2")));
  EXPECT_EQ(network, NetworkOf(network));
  EXPECT_NE(network, NetworkOf(Remote("2001:db8:1:3::1")));
  EXPECT_NE(Remote("2001:db8:1:2::1"), Remote("2001:db8:1:2::2")) << "they are two callers";
  EXPECT_NE(NetworkOf(Remote("fd00::1")), Remote("fd00::1")) << "private networks are networks";
}

TEST(NetworkOf, OthersAreNetworksOfTheirOwn) {
  for (const char* host : {"10.0.0.1", "::ffff:10.0.0.1", "::1", "fe80::1", "febf::1"}) {
    EXPECT_EQ(NetworkOf(Remote(host)), Remote(host)) << host;
  }
  EXPECT_NE(NetworkOf(Remote("fec0::1")), Remote("fec0::1")) << "it is not link-local";
  for (const std::uint32_t user : {std::uint32_t{0}, geteuid() + 1}) {
    const CallerKey local = CallerKeyOf(IpOf("2001:db8::1"), {true, user});
    EXPECT_EQ(NetworkOf(local), local) << "a caller of this machine is not one of its neighbours";
  }
}

TEST(NetworkText, NamesTheNetworkOrTheAddress) {
  EXPECT_EQ(NetworkText(IpOf("2001:db8:1:2::1")), "2001:db8:1:2::/64");
  EXPECT_EQ(NetworkText(IpOf("10.0.0.1")), "10.0.0.1");
  EXPECT_EQ(NetworkText(IpOf("::ffff:10.0.0.1")), "10.0.0.1");
  EXPECT_EQ(NetworkText(IpOf("::1")), "::1");
  EXPECT_EQ(NetworkText(IpOf("fe80::1")), "fe80::1");
}

TEST(LargestOf, IsTheLargestCallerOfTheLargestNetwork) {
  const CallerKey node = Remote("10.0.0.1"), other = Remote("10.0.0.2");
  EXPECT_EQ(LargestOf({node, other, other}), other);
  EXPECT_EQ(LargestOf({node, other}), node) << "the first of several";
  // A machine that uses each address once.
  EXPECT_EQ(
      LargestOf({node, node, Remote("2001:db8::1"), Remote("2001:db8::2"), Remote("2001:db8::3")}),
      Remote("2001:db8::1"));
  // A node in the network of a machine that uses one address.
  EXPECT_EQ(LargestOf({Remote("2001:db8::1"), Remote("2001:db8::2"), Remote("2001:db8::2")}),
            Remote("2001:db8::2"));
}

TEST(CallerPlaceOf, KnowsTheUserOfALocalConnection) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress any = ParseAddress("127.0.0.1", 0).value();
  ASSERT_EQ(bind(listener.get(), any.get(), any.length), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  const SocketAddress address = ParseAddress("127.0.0.1", LocalPort(listener.get())).value();
  const UniqueFd theirs(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(theirs.get(), address.get(), address.length), 0);
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  const UniqueFd ours(accept(listener.get(), reinterpret_cast<sockaddr*>(&peer), &length));
  ASSERT_TRUE(ours.valid());
  const CallerPlace place = CallerPlaceOf(ours.get(), peer);
  EXPECT_TRUE(place.local);
  EXPECT_EQ(place.user.has_value(), CanFindOwners());
  EXPECT_EQ(place.user.value_or(getuid()), getuid());
  const CallerPlace elsewhere =
      CallerPlaceOf(ours.get(), ParseAddress("192.0.2.1", 1).value().storage);
  EXPECT_FALSE(elsewhere.local);
  EXPECT_FALSE(elsewhere.user.has_value());
}

}  // namespace
}  // namespace gradsync::daemon
