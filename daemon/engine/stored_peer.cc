#include "daemon/engine/stored_peer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace gradsync::daemon {

std::string EncodeStoredPeer(absl::string_view address, std::uint16_t port, absl::string_view token,
                             absl::string_view agreement) {
  return absl::StrCat(address, " ", port, " ", absl::BytesToHexString(token), "\n", agreement);
}

absl::StatusOr<StoredPeer> DecodeStoredPeer(absl::string_view value) {
  const std::pair<absl::string_view, absl::string_view> lines =
      absl::StrSplit(value, absl::MaxSplits('\n', 1));
  const std::vector<absl::string_view> words = absl::StrSplit(lines.first, ' ');
  std::uint32_t port = 0;
  // The C library, which reads the address, would end it at a NUL.
  if (words.size() != 3 || absl::StrContains(words[0], '\0') ||
      !absl::SimpleAtoi(words[1], &port) || port > 65535) {
    return absl::InvalidArgumentError("not an address and a port");
  }
  if (words[2].size() != 2 * kPeerTokenBytes ||
      !std::all_of(words[2].begin(), words[2].end(), absl::ascii_isxdigit)) {
    return absl::InvalidArgumentError("not a token");
  }
  absl::StatusOr<SocketAddress> address =
      ParseAddress(std::string(words[0]), static_cast<std::uint16_t>(port));
  if (!address.ok()) return address.status();
  return StoredPeer{*address, absl::HexStringToBytes(words[2]), std::string(lines.second)};
}

}  // namespace gradsync::daemon
