#include "daemon/engine/caller.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/socket_owner.h"

namespace gradsync::daemon {
namespace {

// fe80::/10
bool IsLinkLocal(const std::array<std::uint8_t, 16>& ip) {
  return ip[0] == 0xFE && (ip[1] & 0xC0) == 0x80;
}

// False: the address is a network of its own.
bool IsOfNetwork(const std::array<std::uint8_t, 16>& ip) {
  // Zeros: a mapped IPv4 address, or a loopback one.
  const bool zeros = std::all_of(ip.begin(), ip.begin() + kNetworkBytes,
                                 [](std::uint8_t byte) { return byte == 0; });
  return !zeros && !IsLinkLocal(ip);
}

// The one that occurs most; of several, the first. `keys` is not empty.
CallerKey MostFrequent(const std::vector<CallerKey>& keys) {
  std::map<CallerKey, std::size_t> counts;
  std::size_t most = 0;
  for (const CallerKey& key : keys) most = std::max(most, ++counts[key]);
  return *std::find_if(keys.begin(), keys.end(),
                       [&](const CallerKey& key) { return counts.at(key) == most; });
}

}  // namespace

CallerPlace CallerPlaceOf(int connection, const sockaddr_storage& other_end) {
  CallerPlace place;
  place.local = IsOwnAddress(other_end);
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  if (place.local && CanFindOwners() &&
      getsockname(connection, reinterpret_cast<sockaddr*>(&own), &size) == 0) {
    place.user = OwnerOf(TcpEnd::Of(other_end), TcpEnd::Of(own));
  }
  return place;
}

CallerKey CallerKeyOf(const std::array<std::uint8_t, 16>& ip, const CallerPlace& place) {
  if (!place.local) return {ip, std::nullopt};
  const bool may_be_daemon = place.user == 0u || place.user == geteuid();
  return {may_be_daemon ? ip : std::array<std::uint8_t, 16>{}, place.user};
}

CallerKey NetworkOf(const CallerKey& caller) {
  const auto& [ip, user] = caller;
  if (user.has_value() || !IsOfNetwork(ip)) return caller;
  CallerKey network;
  std::copy_n(ip.begin(), kNetworkBytes, network.first.begin());
  return network;
}

std::string NetworkText(const std::array<std::uint8_t, 16>& ip) {
  TcpEnd end;
  end.ip = NetworkOf(CallerKey(ip, std::nullopt)).first;
  char text[INET6_ADDRSTRLEN] = "";
  if (end.IsIpv4()) {
    inet_ntop(AF_INET, &end.ip[end.ip.size() - sizeof(in_addr)], text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, end.ip.data(), text, sizeof(text));
  }
  return IsOfNetwork(ip) ? absl::StrCat(text, "/", 8 * kNetworkBytes) : text;
}

CallerKey LargestOf(const std::vector<CallerKey>& callers) {
  std::vector<CallerKey> networks;
  for (const CallerKey& caller : callers) networks.push_back(NetworkOf(caller));
  const CallerKey largest = MostFrequent(networks);
  std::vector<CallerKey> in_largest;
  for (std::size_t i = 0; i < callers.size(); ++i) {
    if (networks[i] == largest) in_largest.push_back(callers[i]);
  }
  return MostFrequent(in_largest);
}

}  // namespace gradsync::daemon
