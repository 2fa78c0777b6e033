#include "daemon/peer/local_caller.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "daemon/engine/local_address.h"
#include "daemon/peer/peer_address.h"

namespace gradsync::daemon {
namespace {

constexpr absl::string_view kEstablished = "01";  // TCP_ESTABLISHED, as the tables write it

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

// The kernel's tables of TCP sockets, or the start of long ones.
std::string Tables() {
  constexpr std::size_t kMostBytes = std::size_t{16} << 20;
  std::string tables;
  for (const char* const path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string table(kMostBytes, '\0');
    file.read(table.data(), static_cast<std::streamsize>(table.size()));
    table.resize(static_cast<std::size_t>(file.gcount()));
    tables += table;
  }
  return tables;
}

// How the tables may write the caller's address. An IPv4 address may also be in tcp6, mapped.
std::vector<std::string> Spellings(absl::string_view caller) {
  std::uint32_t port = 0;
  if (!absl::SimpleAtoi(caller.substr(caller.rfind(':') + 1), &port)) return {};
  std::string host = HostOfCaller(caller);
  host = host.substr(0, host.find('%'));  // the tables have no zones
  const std::string end = absl::StrFormat(":%04X", port);
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    v6 = in6_addr{};
    v6.s6_addr[10] = v6.s6_addr[11] = 0xFF;
    std::memcpy(&v6.s6_addr[12], &v4, sizeof(v4));
    return {TableWords(&v4, sizeof(v4)) + end, TableWords(&v6, sizeof(v6)) + end};
  }
  if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return {};
  std::vector<std::string> spellings = {TableWords(&v6, sizeof(v6)) + end};
  if (IN6_IS_ADDR_V4MAPPED(&v6)) spellings.push_back(TableWords(&v6.s6_addr[12], 4) + end);
  return spellings;
}

}  // namespace

std::optional<TcpEnd> EndOfCaller(absl::string_view text) {
  std::uint32_t port = 0;
  if (!absl::SimpleAtoi(text.substr(text.rfind(':') + 1), &port) || port > 65535) {
    return std::nullopt;
  }
  std::string host = HostOfCaller(text);
  host = host.substr(0, host.find('%'));
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(static_cast<std::uint16_t>(port));
  } else if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(static_cast<std::uint16_t>(port));
  } else {
    return std::nullopt;
  }
  return TcpEnd::Of(address);
}

bool IsOwnAddress(const std::string& host) {
  const absl::StatusOr<SocketAddress> address = ParseAddress(host, 0);
  return address.ok() && IsOwnAddress(address->storage);
}

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
    if (fields[3] != kEstablished || !absl::EndsWith(fields[2], remote)) continue;
    if (std::find(spellings.begin(), spellings.end(), fields[1]) == spellings.end()) continue;
    users.push_back(user);
  }
  return users;
}

std::vector<TcpEnd> OwnEndsTo(absl::string_view address) {
  std::vector<TcpEnd> ends;
  const std::optional<TcpEnd> other = EndOfCaller(address);
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir("/proc/self/fd"), closedir);
  if (!other.has_value() || open == nullptr) return ends;
  while (const dirent* const entry = readdir(open.get())) {
    int fd = -1;
    sockaddr_storage found{};
    auto* const any = reinterpret_cast<sockaddr*>(&found);
    socklen_t size = sizeof(found);
    if (!absl::SimpleAtoi(entry->d_name, &fd) || getpeername(fd, any, &size) != 0 ||
        !TcpEnd::Of(found).SamePlace(*other)) {
      continue;
    }
    size = sizeof(found);
    if (getsockname(fd, any, &size) == 0) ends.push_back(TcpEnd::Of(found));
  }
  return ends;
}

std::string WhyStranger(absl::string_view address,
                        absl::FunctionRef<std::vector<TcpEnd>()> own_ends) {
  if (!IsOwnAddress(HostOfCaller(address))) return "";
  std::vector<std::uint32_t> users;
  const std::optional<TcpEnd> other = EndOfCaller(address);
  const std::vector<TcpEnd> ends = other.has_value() ? own_ends() : std::vector<TcpEnd>();
  if (CanFindOwners()) {
    for (const TcpEnd& own : ends) {
      const std::optional<std::uint32_t> user = OwnerOf(*other, own);
      if (user.has_value()) users.push_back(*user);
    }
  } else if (!ends.empty()) {
    const std::string tables = Tables();
    for (const TcpEnd& own : ends) {
      const std::vector<std::uint32_t> found = UsersAt(address, own.port, tables);
      users.insert(users.end(), found.begin(), found.end());
    }
  }
  if (users.empty()) return "a process of this machine that has closed its connection";
  for (const std::uint32_t user : users) {
    if (user != 0 && user != geteuid()) {
      return absl::StrCat("a process of user ", user, " on this machine");
    }
  }
  return "";
}

}  // namespace gradsync::daemon
