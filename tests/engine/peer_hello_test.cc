#include "daemon/engine/peer_hello.h"

#include <gtest/gtest.h>

#include <string>

namespace gradsync::daemon {
namespace {

const std::string& Token() {
  static const auto* const token = new std::string(kPeerTokenBytes, 't');
  return *token;
}

TEST(PeerHello, IsReadAsItWasWritten) {
  for (const std::uint32_t number : {0u, 1u, 255u, 256u, 0x80000000u, 0xffffffffu}) {
    const std::string bytes = EncodePeerHello(Token(), {number, ~number});
    EXPECT_EQ(bytes.size(), kPeerHelloBytes);
    const auto hello = DecodePeerHello(bytes, Token());
    ASSERT_TRUE(hello.has_value()) << number;
    EXPECT_EQ(hello->node, number);
    EXPECT_EQ(hello->channel, ~number);
  }
}

TEST(PeerHello, OneWrongByteOfTheTokenIsRefused) {
  for (std::size_t i = 0; i < kPeerTokenBytes; ++i) {
    std::string bytes = EncodePeerHello(Token(), {1, 2});
    bytes[i] = 'x';
    EXPECT_FALSE(DecodePeerHello(bytes, Token()).has_value()) << i;
  }
}

TEST(PeerHello, AnotherLengthIsRefused) {
  const std::string bytes = EncodePeerHello(Token(), {1, 2});
  EXPECT_FALSE(DecodePeerHello("", Token()).has_value());
  EXPECT_FALSE(DecodePeerHello(bytes.substr(0, bytes.size() - 1), Token()).has_value());
  EXPECT_FALSE(DecodePeerHello(bytes + "x", Token()).has_value());
  EXPECT_FALSE(DecodePeerHello(bytes, "").has_value());
}

}  // namespace
}  // namespace gradsync::daemon
