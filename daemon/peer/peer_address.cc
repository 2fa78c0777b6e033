#include "daemon/peer/peer_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

namespace {

bool IsName(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_';
  });
}

// A DNS name, an IPv4 address, or an IPv6 address, which may end in a zone ("fe80::2%eth0").
bool IsHost(absl::string_view host) {
  // A reader of C strings would see only the part before a NUL.
  if (host.size() > kMaxHostBytes || absl::StrContains(host, '\0')) return false;
  if (!absl::StrContains(host, ':')) return IsName(host);
  const std::size_t percent = host.find('%');
  in6_addr address;
  return inet_pton(AF_INET6, std::string(host.substr(0, percent)).c_str(), &address) == 1 &&
         (percent == absl::string_view::npos || IsName(host.substr(percent + 1)));
}

}  // namespace

bool PeerAddress::IsLoopback() const {
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

bool PeerAddress::IsWildcard() const { return host == "0.0.0.0" || host == "::"; }

std::string PeerAddress::Text() const {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

std::string PeerAddress::Target() const {
  return absl::StrCat("dns:///", absl::StrReplaceAll(Text(), {{"%", "%25"}}));
}

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
  // SimpleAtoi() also takes blanks and signs.
  const bool good =
      port.empty() || (port.front() == ':' && port.size() > 1 &&
                       std::all_of(port.begin() + 1, port.end(), absl::ascii_isdigit) &&
                       absl::SimpleAtoi(port.substr(1), &number) && number <= 65535);
  if (!good || !IsHost(host)) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("'", text, "' is not a host or host:port of a daemon"));
  }
  address.host = std::string(host);
  address.port = static_cast<std::uint16_t>(number);
  return address;
}

std::string HostOfCaller(absl::string_view caller) {
  if (!absl::ConsumePrefix(&caller, "ipv4:") && !absl::ConsumePrefix(&caller, "ipv6:")) return "";
  absl::string_view host = caller.substr(0, caller.rfind(':'));
  if (!absl::ConsumePrefix(&host, "%5B")) absl::ConsumePrefix(&host, "[");
  if (!absl::ConsumeSuffix(&host, "%5D")) absl::ConsumeSuffix(&host, "]");
  return absl::StrReplaceAll(host, {{"%25", "%"}});
}

}  // namespace gradsync::daemon
