#include "daemon/peer/local_caller.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/base/clock.h"
#include "daemon/engine/local_address.h"
#include "daemon/peer/socket_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kit/temporary_directory.h"

namespace gradsync::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TcpEnd EndOf(const std::string& host, std::uint16_t port) {
  return TcpEnd::Of(ParseAddress(host, port).value().storage);
}

TEST(EndOfCallerTest, ReadsWhatGrpcSays) {
  const auto ipv4 = EndOfCaller("ipv4:127.0.0.1:4711");
  ASSERT_TRUE(ipv4.has_value());
  EXPECT_TRUE(ipv4->IsIpv4());
  EXPECT_TRUE(ipv4->SamePlace(EndOf("127.0.0.1", 4711)));
  EXPECT_TRUE(ipv4->SamePlace(EndOf("::ffff:127.0.0.1", 4711)));
  EXPECT_FALSE(ipv4->SamePlace(EndOf("127.0.0.1", 4712)));
  EXPECT_FALSE(ipv4->SamePlace(EndOf("127.0.0.2", 4711)));
  const auto ipv6 = EndOfCaller("ipv6:%5Bfe80::1%25eth0%5D:4711");
  ASSERT_TRUE(ipv6.has_value());
  EXPECT_FALSE(ipv6->IsIpv4());
  EXPECT_TRUE(ipv6->SamePlace(EndOf("fe80::1", 4711)));
  for (const char* text :
       {"", "ipv4:", "ipv4:x:1", "ipv4:127.0.0.1:x", "ipv4:127.0.0.1:65536", "unix:/run/x.sock"}) {
    EXPECT_FALSE(EndOfCaller(text).has_value()) << text;
  }
}

// Both ends of a connection of this process.
class Connection {
 public:
  Connection() {
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listens_, any, size), 0);
    EXPECT_EQ(listen(listens_, 1), 0);
    EXPECT_EQ(getsockname(listens_, any, &size), 0);
    port_ = ntohs(address.sin_port);
    EXPECT_EQ(connect(calls_, any, size), 0);
    EXPECT_EQ(getsockname(calls_, any, &size), 0);
    caller_ = absl::StrCat("ipv4:127.0.0.1:", ntohs(address.sin_port));
  }
  ~Connection() {
    Close();
    close(listens_);
  }
  void Close() {
    if (calls_ >= 0) close(calls_);
    calls_ = -1;
  }
  std::uint16_t port() const { return port_; }
  const std::string& caller() const { return caller_; }
  // The end that has been called.
  TcpEnd end() const { return *EndOfCaller(absl::StrCat("ipv4:127.0.0.1:", port_)); }

 private:
  int listens_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int calls_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::uint16_t port_ = 0;
  std::string caller_;
};

// What the accepting side asks about its caller.
std::string WhyCallerIsStranger(const Connection& connection, SocketTable* table = nullptr) {
  return WhyStranger(
      connection.caller(), [&] { return std::vector<TcpEnd>{connection.end()}; }, table,
      MonotonicNowNs());
}

TEST(LocalCallerTest, OwnConnectionIsNoStranger) {
  Connection own;
  EXPECT_EQ(WhyCallerIsStranger(own), "");
}

TEST(LocalCallerTest, ClosedConnectionIsAStranger) {
  Connection own;
  own.Close();
  EXPECT_THAT(WhyCallerIsStranger(own), HasSubstr("closed its connection"));
}

// Where the kernel does not answer about one connection.
TEST(LocalCallerTest, TheKernelsTablesSayTheSame) {
  const MonotonicClock clock;
  SocketTable table(&clock);
  Connection own;
  EXPECT_EQ(WhyCallerIsStranger(own, &table), "");
  own.Close();
  EXPECT_THAT(WhyCallerIsStranger(own, &table), HasSubstr("closed its connection"));
}

TEST(LocalCallerTest, AnotherUserInTheTablesIsAStranger) {
  const MonotonicClock clock;
  const Connection own;
  const std::uint32_t somebody = geteuid() + 1;
  const TemporaryDirectory folder;
  const std::string file = folder.File("tcp");
  std::ofstream(file) << absl::StrFormat(
      "   1: 0100007F:%04X 0100007F:%04X 01 00000000:00000000 00:00000000 00000000 %u 0 2\n",
      EndOfCaller(own.caller())->port, own.port(), somebody);
  SocketTable table(&clock, {file});
  EXPECT_THAT(WhyCallerIsStranger(own, &table), HasSubstr(absl::StrCat("user ", somebody, " ")));
}

TEST(LocalCallerTest, ConnectionThatThisProcessHasClosedIsAStranger) {
  Connection own;
  const auto none = [] { return std::vector<TcpEnd>(); };
  EXPECT_THAT(WhyStranger(own.caller(), none, nullptr, MonotonicNowNs()),
              HasSubstr("closed its connection"));
}

TEST(LocalCallerTest, OtherMachinesAreNotJudged) {
  const auto never = [] {
    ADD_FAILURE() << "asked for this process's ends";
    return std::vector<TcpEnd>();
  };
  EXPECT_EQ(WhyStranger("ipv4:192.0.2.1:4711", never, nullptr, MonotonicNowNs()), "");
  EXPECT_EQ(WhyStranger("ipv6:%5B2001:db8::1%5D:4711", never, nullptr, MonotonicNowNs()), "");
}

TEST(LocalCallerTest, OwnEndsOfAConnectionAreFound) {
  Connection own, other;
  const std::vector<TcpEnd> ends = OwnEndsTo(absl::StrCat("ipv4:127.0.0.1:", own.port()));
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_TRUE(ends[0].SamePlace(*EndOfCaller(own.caller())));
  EXPECT_THAT(OwnEndsTo("ipv4:127.0.0.2:4711"), IsEmpty());
  EXPECT_THAT(OwnEndsTo("unix:/run/x.sock"), IsEmpty());
}

}  // namespace
}  // namespace gradsync::daemon
