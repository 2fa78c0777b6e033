#include "daemon/engine/stored_peer.h"

#include <gtest/gtest.h>
#include <netinet/in.h>

#include <string>

namespace gradsync::daemon {
namespace {

const char kToken[] = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1eff";

std::string Value(const std::string& first_line) { return first_line + "\nlanes=2"; }

TEST(StoredPeer, IsReadAsItWasWritten) {
  std::string token(kPeerTokenBytes, '\0');
  for (std::size_t i = 0; i < token.size(); ++i) token[i] = static_cast<char>(200 + i);
  // The agreement may be anything, another newline too.
  for (const std::string agreement : {"lanes=2 chunk=1", "", "a\nb"}) {
    for (const char* const address : {"10.1.2.3", "2001:db8::7"}) {
      const auto peer = DecodeStoredPeer(EncodeStoredPeer(address, 65535, token, agreement));
      ASSERT_TRUE(peer.ok()) << peer.status();
      EXPECT_EQ(peer->token, token);
      EXPECT_EQ(peer->agreement, agreement);
      const bool v4 = peer->address.storage.ss_family == AF_INET;
      EXPECT_EQ(v4 ? reinterpret_cast<const sockaddr_in*>(peer->address.get())->sin_port
                   : reinterpret_cast<const sockaddr_in6*>(peer->address.get())->sin6_port,
                65535);
    }
  }
}

TEST(StoredPeer, EveryOtherValueIsRefused) {
  const std::string token = kToken;
  ASSERT_TRUE(DecodeStoredPeer(Value("127.0.0.1 1 " + token)).ok());
  ASSERT_TRUE(DecodeStoredPeer("127.0.0.1 1 " + token).ok()) << "an empty agreement";
  for (const std::string& value : {
           std::string(),
           Value(""),
           Value("127.0.0.1"),
           Value("127.0.0.1 1"),
           Value("127.0.0.1 1 " + token + " more"),
           Value("127.0.0.1 65536 " + token),
           Value("127.0.0.1 -1 " + token),
           Value("127.0.0.1 x " + token),
           Value("127.0.0.1 1 " + token.substr(2)),
           Value("127.0.0.1 1 " + token + "00"),
           Value("127.0.0.1 1 g" + token.substr(1)),
           Value("localhost 1 " + token),
           Value(" 1 " + token),
           Value(std::string("127.0.0.1\0.evil", 15) + " 1 " + token),
       }) {
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeStoredPeer(value).status())) << value;
  }
}

}  // namespace
}  // namespace gradsync::daemon
