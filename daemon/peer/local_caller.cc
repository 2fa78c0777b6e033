#include "daemon/peer/local_caller.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/local_address.h"
#include "daemon/peer/peer_address.h"

namespace gradsync::daemon {

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
                        absl::FunctionRef<std::vector<TcpEnd>()> own_ends, SocketTable* table,
                        std::uint64_t since_ns) {
  if (!IsOwnAddress(HostOfCaller(address))) return "";
  std::vector<std::uint32_t> users;
  const std::optional<TcpEnd> other = EndOfCaller(address);
  const std::vector<TcpEnd> ends = other.has_value() ? own_ends() : std::vector<TcpEnd>();
  for (const TcpEnd& own : ends) {
    if (table != nullptr) {
      const std::vector<std::uint32_t> found = table->UsersOf(*other, own.port, since_ns);
      users.insert(users.end(), found.begin(), found.end());
    } else if (const std::optional<std::uint32_t> user = OwnerOf(*other, own)) {
      users.push_back(*user);
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
