#include "daemon/peer/peer_address.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

namespace {

// A DNS name, an IPv4 address, or an IPv6 address, which may end in a zone ("fe80::2%eth0").
bool IsHost(absl::string_view host) {
  if (host.empty() || host.size() > 255) return false;
  if (!absl::StrContains(host, ':')) {
    return std::all_of(host.begin(), host.end(), [](char c) {
      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_';
    });
  }
  const absl::string_view number = host.substr(0, host.find('%'));
  in6_addr address;
  return inet_pton(AF_INET6, std::string(number).c_str(), &address) == 1 &&
         std::all_of(host.begin(), host.end(), [](char c) {
           return absl::ascii_isgraph(static_cast<unsigned char>(c)) && c != '/' && c != ']';
         });
}

}  // namespace

bool PeerAddress::IsLoopback() const {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

bool PeerAddress::IsWildcard() const { return host == "0.0.0.0" || host == "::"; }

std::string PeerAddress::Text() const {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

std::string PeerAddress::Target() const { return absl::StrCat("dns:///", Text()); }

absl::StatusOr<PeerAddress> ParsePeerAddress(absl::string_view text, std::uint16_t default_port) {
  PeerAddress address;
  address.port = default_port;
  absl::string_view host = text, port;
  if (absl::StartsWith(text, "[")) {
    const std::size_t close = text.find(']');
    if (close != absl::string_view::npos) {
      host = text.substr(1, close - 1);
      port = text.substr(close + 1);
    }
  } else if (const std::size_t colon = text.find(':');
             colon != absl::string_view::npos && colon == text.rfind(':')) {
    host = text.substr(0, colon);
    port = text.substr(colon);
  }
  std::uint32_t number = default_port;
  address.port_given = !port.empty();
  const bool good = port.empty() || (port.front() == ':' &&
                                     absl::SimpleAtoi(port.substr(1), &number) && number <= 65535);
  if (!good || !IsHost(host)) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("'", text, "' is not a host or host:port of a daemon"));
  }
  address.host = std::string(host);
  address.port = static_cast<std::uint16_t>(number);
  return address;
}

}  // namespace gradsync::daemon
