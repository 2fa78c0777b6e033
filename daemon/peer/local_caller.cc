#include "daemon/peer/local_caller.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace gradsync::daemon {
namespace {

// An address as the tables write it: each 32-bit word of the address as the machine reads it.
std::string TableWords(const void* address, std::size_t bytes) {
  std::string text;
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t word;
    std::memcpy(&word, static_cast<const char*>(address) + at, sizeof(word));
    absl::StrAppendFormat(&text, "%08X", word);
  }
  return text;
}

// How the tables may write the caller's address. An IPv4 address may also be in tcp6, mapped.
std::vector<std::string> Spellings(absl::string_view caller) {
  if (!absl::ConsumePrefix(&caller, "ipv4:") && !absl::ConsumePrefix(&caller, "ipv6:")) return {};
  const std::size_t colon = caller.rfind(':');
  std::uint32_t port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(caller.substr(colon + 1), &port)) {
    return {};
  }
  absl::string_view host = caller.substr(0, colon);
  if (!absl::ConsumePrefix(&host, "%5B")) absl::ConsumePrefix(&host, "[");
  if (!absl::ConsumeSuffix(&host, "%5D")) absl::ConsumeSuffix(&host, "]");
  host = host.substr(0, host.find('%'));  // the zone
  const std::string end = absl::StrFormat(":%04X", port);
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, std::string(host).c_str(), &v4) == 1) {
    v6 = in6_addr{};
    v6.s6_addr[10] = v6.s6_addr[11] = 0xFF;
    std::memcpy(&v6.s6_addr[12], &v4, sizeof(v4));
    return {TableWords(&v4, sizeof(v4)) + end, TableWords(&v6, sizeof(v6)) + end};
  }
  if (inet_pton(AF_INET6, std::string(host).c_str(), &v6) != 1) return {};
  std::vector<std::string> spellings = {TableWords(&v6, sizeof(v6)) + end};
  if (IN6_IS_ADDR_V4MAPPED(&v6)) spellings.push_back(TableWords(&v6.s6_addr[12], 4) + end);
  return spellings;
}

}  // namespace

std::vector<std::uint32_t> UsersAt(absl::string_view address,
                                   std::optional<std::uint16_t> remote_port,
                                   absl::string_view tables) {
  std::vector<std::uint32_t> users;
  const std::vector<std::string> spellings = Spellings(address);
  const std::string remote = remote_port.has_value() ? absl::StrFormat(":%04X", *remote_port) : "";
  for (const absl::string_view line : absl::StrSplit(tables, '\n')) {
    // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid ...
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    std::uint32_t user = 0;
    if (fields.size() < 8 || !absl::SimpleAtoi(fields[7], &user)) continue;
    if (!absl::EndsWith(fields[2], remote)) continue;
    if (std::find(spellings.begin(), spellings.end(), fields[1]) == spellings.end()) continue;
    users.push_back(user);
  }
  return users;
}

std::optional<std::uint32_t> StrangerAt(absl::string_view address,
                                        std::optional<std::uint16_t> remote_port) {
  std::ostringstream tables;
  for (const char* const path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    if (file.good()) tables << file.rdbuf();
  }
  for (const std::uint32_t user : UsersAt(address, remote_port, tables.str())) {
    if (user != 0 && user != geteuid()) return user;
  }
  return std::nullopt;
}

}  // namespace gradsync::daemon
