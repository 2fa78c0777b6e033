#include "daemon/engine/caller.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

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

TEST(CallerKeyOf, WhoMayRunADaemonIsACallerAtEachAddress) {
  const Ip first = IpOf("127.0.0.1"), second = IpOf("127.0.0.2");
  for (const std::uint32_t user : {0u, static_cast<std::uint32_t>(geteuid())}) {
    EXPECT_NE(CallerKeyOf(first, {true, user}), CallerKeyOf(second, {true, user}));
    EXPECT_EQ(CallerKeyOf(first, {true, user}), CallerKeyOf(first, {true, user}));
  }
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
