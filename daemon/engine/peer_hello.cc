#include "daemon/engine/peer_hello.h"

#include <openssl/crypto.h>

namespace gradsync::daemon {
namespace {

std::uint32_t NumberAt(absl::string_view bytes, std::size_t at) {
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    number |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  }
  return number;
}

}  // namespace

std::string EncodePeerHello(absl::string_view token, const PeerHello& hello) {
  std::string bytes(token);
  for (const std::uint32_t number : {hello.node, hello.channel}) {
    for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
  }
  return bytes;
}

std::optional<PeerHello> DecodePeerHello(absl::string_view bytes, absl::string_view token) {
  if (bytes.size() != kPeerHelloBytes || token.size() != kPeerTokenBytes ||
      CRYPTO_memcmp(bytes.data(), token.data(), kPeerTokenBytes) != 0) {
    return std::nullopt;
  }
  return PeerHello{NumberAt(bytes, kPeerTokenBytes), NumberAt(bytes, kPeerTokenBytes + 4)};
}

}  // namespace gradsync::daemon
