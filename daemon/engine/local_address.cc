#include "daemon/engine/local_address.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/socket_owner.h"

namespace gradsync::daemon {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::StatusOr<std::string> Number(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  if (getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) {
    return absl::InternalError("an address that cannot be written");
  }
  return std::string(text);
}

AddressList Resolve(const char* host, const char* port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  if (getaddrinfo(host, port, &hints, &list) != 0) list = nullptr;
  return AddressList(list, &freeaddrinfo);
}

bool IsLinkLocal(const sockaddr* address) {
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

absl::StatusOr<std::string> InterfaceAddress(const std::string& interface) {
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) return absl::InternalError("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(raw, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = raw; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || interface != entry->ifa_name) continue;
      if (entry->ifa_addr->sa_family != family) continue;
      if (family == AF_INET6 && IsLinkLocal(entry->ifa_addr)) continue;
      return Number(entry->ifa_addr,
                    family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  return absl::NotFoundError(absl::StrCat("no address on interface ", interface));
}

// Whether bind() succeeds for every address, as on hosts that share addresses (keepalived).
bool CanBindAny() {
  for (const char* const family : {"ipv4", "ipv6"}) {
    const UniqueFd file(open(absl::StrCat("/proc/sys/net/", family, "/ip_nonlocal_bind").c_str(),
                             O_RDONLY | O_CLOEXEC));
    char set = '0';
    if (file.valid() && read(file.get(), &set, 1) == 1 && set != '0') return true;
  }
  return false;
}

// Whether an interface has the address, or it is a loopback address.
bool IsAssigned(const sockaddr_storage& address) {
  const TcpEnd wanted = TcpEnd::Of(address);
  constexpr std::size_t kFirstOfIpv4 = 12;
  if (wanted.IsIpv4() && wanted.ip[kFirstOfIpv4] == IN_LOOPBACKNET) return true;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return true;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    sockaddr_storage assigned{};
    std::memcpy(&assigned, one->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (TcpEnd::Of(assigned).ip == wanted.ip) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::string> LocalAddress(const std::string& host, const std::string& interface) {
  if (host.empty()) {
    if (interface.empty()) return absl::InvalidArgumentError("neither address nor interface");
    return InterfaceAddress(interface);
  }
  const AddressList list = Resolve(host.c_str(), nullptr, 0);
  if (list == nullptr) return absl::NotFoundError(absl::StrCat("no address for ", host));
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const UniqueFd probe(socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!probe.valid() || bind(probe.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    return Number(entry->ai_addr, entry->ai_addrlen);
  }
  return absl::NotFoundError(absl::StrCat(host, " is no address of this machine"));
}

absl::StatusOr<std::string> LocalAddressTowards(const std::string& remote) {
  const absl::StatusOr<SocketAddress> to = ParseAddress(remote, /*port=*/9);
  if (!to.ok()) return to.status();
  const UniqueFd probe(socket(to->storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  SocketAddress from;
  from.length = sizeof(from.storage);
  if (!probe.valid() || connect(probe.get(), to->get(), to->length) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length) != 0) {
    return absl::UnavailableError(absl::StrCat("no route to ", remote));
  }
  return Number(from.get(), from.length);
}

absl::StatusOr<SocketAddress> ParseAddress(const std::string& number, std::uint16_t port) {
  const AddressList list =
      Resolve(number.c_str(), absl::StrCat(port).c_str(), AI_NUMERICHOST | AI_NUMERICSERV);
  if (list == nullptr) return absl::InvalidArgumentError("not a numeric address");
  SocketAddress address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.length = list->ai_addrlen;
  return address;
}

bool IsOwnAddress(const sockaddr_storage& address) {
  sockaddr_storage any_port = address;
  socklen_t length = sizeof(sockaddr_in);
  if (address.ss_family == AF_INET6) {
    length = sizeof(sockaddr_in6);
    reinterpret_cast<sockaddr_in6*>(&any_port)->sin6_port = 0;
  } else if (address.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&any_port)->sin_port = 0;
  } else {
    return false;
  }
  const UniqueFd probe(socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return true;
  return bind(probe.get(), reinterpret_cast<const sockaddr*>(&any_port), length) == 0 &&
         (!CanBindAny() || IsAssigned(address));
}

std::uint16_t LocalPort(int fd) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
    return 0;
  }
  if (address.storage.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
  }
  if (address.storage.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  }
  return 0;
}

}  // namespace gradsync::daemon
