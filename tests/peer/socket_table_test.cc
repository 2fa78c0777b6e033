#include "daemon/peer/socket_table.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/socket_owner.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kIpv4[] =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout "
    "inode\n"
    "   0: 0100007F:1CF9 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1\n"
    "   1: 0100007F:1267 0100007F:1CF9 01 00000000:00000000 00:00000000 00000000  1000        0 "
    "2\n";
constexpr char kIpv6[] =
    "  sl  local_address                         remote_address                        st\n"
    "   0: 00000000000000000000000001000000:1268 00000000000000000000000001000000:1CF9 01 "
    "00000000:00000000 00:00000000 00000000  1001        0 3\n"
    "   1: 0000000000000000FFFF00000200007F:1269 0000000000000000FFFF00000100007F:1CF9 01 "
    "00000000:00000000 00:00000000 00000000  1002        0 4\n";

class SocketTableTest : public testing::Test {
 protected:
  SocketTableTest() { Write(kIpv4, kIpv6); }

  void Write(const std::string& ipv4, const std::string& ipv6) {
    std::ofstream(folder_.File("tcp")) << ipv4;
    std::ofstream(folder_.File("tcp6")) << ipv6;
  }
  // Asks about a connection that has come now.
  std::vector<std::uint32_t> UsersOf(const std::string& host, std::uint16_t port,
                                     std::uint16_t remote_port = 7417) {
    clock_.Advance(1);
    return UsersOfSince(clock_.NowNs(), host, port, remote_port);
  }
  std::vector<std::uint32_t> UsersOfSince(std::uint64_t since_ns, const std::string& host,
                                          std::uint16_t port, std::uint16_t remote_port = 7417) {
    return table_.UsersOf(TcpEnd::Of(ParseAddress(host, port).value().storage), remote_port,
                          since_ns);
  }

  const TemporaryDirectory folder_;
  ManualClock clock_;
  SocketTable table_{&clock_, {folder_.File("tcp"), folder_.File("tcp6")}};
};

TEST_F(SocketTableTest, UserOfASocketIsFound) {
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), ElementsAre(1000));
  EXPECT_THAT(UsersOf("::1", 4712), ElementsAre(1001));
}

TEST_F(SocketTableTest, MappedAddressIsTheSameAddress) {
  EXPECT_THAT(UsersOf("127.0.0.2", 4713), ElementsAre(1002));
  EXPECT_THAT(UsersOf("::ffff:127.0.0.2", 4713), ElementsAre(1002));
  EXPECT_THAT(UsersOf("::ffff:127.0.0.1", 4711), ElementsAre(1000));
}

// A process can share the port of another user's socket, and so come first in the table.
TEST_F(SocketTableTest, EveryUserOfASharedPortIsFound) {
  Write(absl::StrCat(kIpv4,
                     "   9: 0100007F:1267 0200007F:1CF9 01 00000000:00000000 00:00000000 00000000  "
                     "   0        0 5\n"),
        kIpv6);
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), ElementsAre(1000, 0));
  EXPECT_THAT(UsersOf("127.0.0.1", 4711, 80), IsEmpty());
}

TEST_F(SocketTableTest, OtherAddressesHaveNoUserHere) {
  EXPECT_THAT(UsersOf("127.0.0.1", 4712), IsEmpty());
  EXPECT_THAT(UsersOf("10.0.0.1", 4711), IsEmpty());
  EXPECT_THAT(UsersOf("::2", 4712), IsEmpty());
}

TEST_F(SocketTableTest, SocketsThatListenOrWereClosedDoNotCount) {
  EXPECT_THAT(UsersOf("127.0.0.1", 7417, 0), IsEmpty());
  Write(absl::StrReplaceAll(kIpv4, {{" 01 ", " 08 "}}), kIpv6);
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), IsEmpty());
}

TEST_F(SocketTableTest, LinesThatAreNoneAreSkipped) {
  Write(absl::StrCat("   0: 0100007F:1267\n",
                     "   1: 0100007X:1267 0100007F:1CF9 01 0:0 0:0 0 7 0 2\n",
                     "   2: 0100007F:11267 0100007F:1CF9 01 0:0 0:0 0 7 0 2\n",
                     "   3: 0100007F:1267 01007F:1CF9 01 0:0 0:0 0 7 0 2\n",
                     "   4: 0100007F:1267 0100007F:1CF9 01 0:0 0:0 0 x 0 2\n",
                     "   5: 0100007F:1267 0100007F:1CF9 01 0:0 0:0 0 100"),
        "");
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), IsEmpty()) << "the last line is not whole";
}

TEST_F(SocketTableTest, WithoutTablesNobodyIsFound) {
  SocketTable table(&clock_, {folder_.File("none")});
  const TcpEnd end = TcpEnd::Of(ParseAddress("127.0.0.1", 4711).value().storage);
  EXPECT_THAT(table.UsersOf(end, 7417, clock_.NowNs()), IsEmpty());
}

// Many blocks; lines cross their borders.
TEST_F(SocketTableTest, LongTablesAreReadUpToABound) {
  std::string long_table;
  std::uint32_t user = 0;
  while (long_table.size() < SocketTable::kMostBytes) {
    absl::StrAppendFormat(&long_table, "%d: 0100007F:%04X 0100007F:%04X 01 0:0 0:0 0 %u 0 2\n",
                          user, user % 60000, user / 60000, user);
    ++user;
  }
  const std::uint32_t whole = user - 2;  // the bound may cut the last line
  const std::uint64_t now_ns = clock_.NowNs();
  absl::StrAppend(&long_table, absl::StrReplaceAll(kIpv4, {{" 1000 ", " 77 "}}));
  Write(long_table, kIpv6);
  for (const std::uint32_t one : {std::uint32_t{0}, std::uint32_t{70'001}, whole}) {
    EXPECT_THAT(UsersOfSince(now_ns, "127.0.0.1", static_cast<std::uint16_t>(one % 60000),
                             static_cast<std::uint16_t>(one / 60000)),
                ElementsAre(one));
  }
  EXPECT_THAT(UsersOfSince(now_ns, "127.0.0.1", 4711), IsEmpty()) << "beyond the bound";
  EXPECT_THAT(UsersOfSince(now_ns, "::1", 4712), ElementsAre(1001))
      << "each file has a bound of its own";
}

// Otherwise each connection of a stranger would cost a read.
TEST_F(SocketTableTest, ConnectionsThatCameBeforeAReadShareIt) {
  const std::uint64_t before_ns = clock_.NowNs();
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), ElementsAre(1000));
  Write("", "");
  EXPECT_THAT(UsersOfSince(before_ns, "127.0.0.1", 4711), ElementsAre(1000));
  EXPECT_THAT(UsersOfSince(clock_.NowNs(), "::1", 4712), ElementsAre(1001));
}

// The port may have been another user's before.
TEST_F(SocketTableTest, AConnectionThatCameLaterGetsAReadOfItsOwn) {
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), ElementsAre(1000));
  Write(absl::StrReplaceAll(kIpv4, {{" 1000 ", " 1003 "}}), kIpv6);
  EXPECT_THAT(UsersOf("127.0.0.1", 4711), ElementsAre(1003));
}

}  // namespace
}  // namespace gradsync::daemon
