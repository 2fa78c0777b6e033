#include "daemon/peer/coordinator_list.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace gradsync::daemon {
namespace {

// The bytes of a numeric address; empty if it is a name.
std::string NumericBytes(const std::string& host) {
  std::string bytes(sizeof(in6_addr), '\0');
  if (inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(sizeof(in_addr));
  if (inet_pton(AF_INET, host.c_str(), bytes.data()) == 1) return bytes;
  return "";
}

bool SameBits(const std::string& a, const std::string& b, std::size_t bits) {
  if (a.size() != b.size() || a.compare(0, bits / 8, b, 0, bits / 8) != 0) return false;
  if (bits % 8 == 0) return true;
  const unsigned difference =
      static_cast<unsigned char>(a[bits / 8]) ^ static_cast<unsigned char>(b[bits / 8]);
  return difference >> (8 - bits % 8) == 0;
}

}  // namespace

absl::StatusOr<CoordinatorList> CoordinatorList::Parse(absl::string_view text,
                                                       std::uint16_t default_port) {
  CoordinatorList list;
  if (text.empty()) return list;
  for (absl::string_view piece : absl::StrSplit(text, ',')) {
    piece = absl::StripAsciiWhitespace(piece);
    absl::StatusOr<Entry> entry = ParseEntry(piece, default_port);
    if (!entry.ok()) return entry.status();
    list.entries_.push_back(*std::move(entry));
  }
  return list;
}

absl::StatusOr<CoordinatorList::Entry> CoordinatorList::ParseEntry(absl::string_view text,
                                                                   std::uint16_t default_port) {
  const absl::Status refused = absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not a host, *.domain or network, with or without a port"));
  Entry entry;
  std::string plain(text);  // without "*." and "/bits": host or host:port
  const bool domain = absl::ConsumePrefix(&text, "*.");
  if (domain) plain = std::string(text);
  const std::size_t slash = text.find('/');
  if (slash != absl::string_view::npos) {
    absl::string_view bits = text.substr(slash + 1);
    const std::size_t colon = bits.find(':');
    const absl::string_view port = colon == absl::string_view::npos ? "" : bits.substr(colon);
    if (!absl::SimpleAtoi(bits.substr(0, colon), &entry.prefix)) return refused;
    plain = std::string(text.substr(0, slash));
    if (absl::StrContains(plain, ':')) plain = absl::StrCat("[", plain, "]");
    absl::StrAppend(&plain, port);
  }
  const auto address = ParsePeerAddress(plain, default_port);
  if (!address.ok()) return refused;
  entry.port = address->port;
  const std::string host = absl::AsciiStrToLower(address->host);
  if (slash == absl::string_view::npos) {
    entry.host = domain ? "." + host : host;
    if (domain && !NumericBytes(host).empty()) return refused;
    return entry;
  }
  entry.network = NumericBytes(host);
  if (domain || entry.network.empty() || entry.prefix > 8 * entry.network.size()) return refused;
  return entry;
}

bool CoordinatorList::Matches(const Entry& entry, const PeerAddress& address) {
  if (entry.port != address.port) return false;
  const std::string host = absl::AsciiStrToLower(address.host);
  const std::string bytes = NumericBytes(host);
  if (!entry.network.empty()) return SameBits(entry.network, bytes, entry.prefix);
  if (absl::StartsWith(entry.host, ".")) {
    const bool name = bytes.empty() && !absl::StrContains(host, ':');
    return name && absl::EndsWith(host, entry.host);
  }
  const std::string wanted = NumericBytes(entry.host);
  return wanted.empty() ? host == entry.host : bytes == wanted;
}

bool CoordinatorList::Allows(const PeerAddress& address) const {
  return entries_.empty() || std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
           return Matches(entry, address);
         });
}

}  // namespace gradsync::daemon
