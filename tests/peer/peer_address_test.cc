#include "daemon/peer/peer_address.h"

#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

TEST(PeerAddressTest, ParsesHostsWithAndWithoutPort) {
  const struct {
    const char* text;
    const char* host;
    int port;
    const char* again;
  } kCases[] = {
      {"node7", "node7", 7417, "node7:7417"},
      {"node7:80", "node7", 80, "node7:80"},
      {"10.0.0.1", "10.0.0.1", 7417, "10.0.0.1:7417"},
      {"[::1]:90", "::1", 90, "[::1]:90"},
      {"[::1]", "::1", 7417, "[::1]:7417"},
      {"fe80::2", "fe80::2", 7417, "[fe80::2]:7417"},
      {"0.0.0.0:0", "0.0.0.0", 0, "0.0.0.0:0"},
      {"[fe80::2%eth0]:9", "fe80::2%eth0", 9, "[fe80::2%eth0]:9"},
  };
  for (const auto& one : kCases) {
    const auto address = ParsePeerAddress(one.text, 7417);
    ASSERT_TRUE(address.ok()) << one.text;
    EXPECT_EQ(address->host, one.host);
    EXPECT_EQ(address->port, one.port);
    EXPECT_EQ(address->Text(), one.again);
    EXPECT_EQ(address->Target(),
              "dns:///" + absl::StrReplaceAll(one.again, {{"%", "%25"}}));  // gRPC decodes it
  }
}

TEST(PeerAddressTest, RefusesInvalidAddresses) {
  for (const char* text : {"",
                           ":80",
                           "node7:",
                           "node7:x",
                           "node7:65536",
                           "node7:-1",
                           "[::1]x",
                           "unix:/run/other.sock",
                           "unix-abstract:name",
                           "dns:///node7",
                           "a:b:c",
                           "node7/",
                           "[::1%5D:80x.example]",
                           "[fe80::1%]",
                           "[::1%a]b]",
                           "node 7",
                           "node7%2f",
                           "[node7]:80x",
                           "user@node7",
                           "fe80::/64"}) {
    EXPECT_FALSE(ParsePeerAddress(text, 7417).ok()) << text;
  }
}

TEST(PeerAddressTest, RefusesWhatCStringsAndNumbersHide) {
  EXPECT_FALSE(ParsePeerAddress(absl::string_view("::1\0.evil", 9), 7417).ok());
  EXPECT_FALSE(ParsePeerAddress(absl::string_view("[::1\0]:80", 10), 7417).ok());
  for (const char* text : {"node7: 80", "node7:+80", "node7:80 ", "node7:-0"}) {
    EXPECT_FALSE(ParsePeerAddress(text, 7417).ok()) << text;
  }
}

TEST(PeerAddressTest, RecognizesLoopbackAndWildcard) {
  for (const char* text :
       {"localhost", "LOCALHOST", "127.0.0.1", "127.3.2.1:9", "::1", "[0:0:0:0:0:0:0:1]"}) {
    EXPECT_TRUE(ParsePeerAddress(text, 1)->IsLoopback()) << text;
    EXPECT_FALSE(ParsePeerAddress(text, 1)->IsWildcard()) << text;
  }
  for (const char* text : {"0.0.0.0", "[::]:5"}) {
    EXPECT_TRUE(ParsePeerAddress(text, 1)->IsWildcard()) << text;
  }
  for (const char* text : {"10.0.0.1", "127.example", "::ffff:10.0.0.1", "node7"}) {
    EXPECT_FALSE(ParsePeerAddress(text, 1)->IsLoopback()) << text;
  }
}

}  // namespace
}  // namespace gradsync::daemon
