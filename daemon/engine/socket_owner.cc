#include "daemon/engine/socket_owner.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/base/clock.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

std::array<std::uint8_t, 16> MapIpv4(const in_addr& v4) {
  std::array<std::uint8_t, 16> ip{};
  std::copy(kMapped.begin(), kMapped.end(), ip.begin());
  std::memcpy(&ip[kMapped.size()], &v4, sizeof(v4));
  return ip;
}

// The address as a request has it. The kernel finds a mapped one among those of IPv4 only.
void CopyIp(const TcpEnd& end, bool ipv4, void* to) {
  const std::size_t from = ipv4 ? kMapped.size() : 0;
  std::memcpy(to, &end.ip[from], end.ip.size() - from);
}

struct Request {
  nlmsghdr header;
  inet_diag_req_v2 body;
};

// What the kernel says of the socket with these ends. If no socket is connected so, it looks for
// one that listens at `own`.
std::optional<inet_diag_msg> Ask(const TcpEnd& own, const TcpEnd& other) {
  const UniqueFd kernel(socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!kernel.valid()) return std::nullopt;
  const bool ipv4 = own.IsIpv4() && other.IsIpv4();
  Request request{};
  request.header.nlmsg_len = sizeof(request);
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.body.sdiag_family = ipv4 ? AF_INET : AF_INET6;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = ~0U;
  CopyIp(own, ipv4, request.body.id.idiag_src);
  CopyIp(other, ipv4, request.body.id.idiag_dst);
  request.body.id.idiag_sport = htons(own.port);
  request.body.id.idiag_dport = htons(other.port);
  request.body.id.idiag_if = std::max(own.interface, other.interface);
  request.body.id.idiag_cookie[0] = request.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  sockaddr_nl to{};
  to.nl_family = AF_NETLINK;
  if (sendto(kernel.get(), &request, sizeof(request), 0, reinterpret_cast<const sockaddr*>(&to),
             sizeof(to)) != static_cast<ssize_t>(sizeof(request))) {
    return std::nullopt;
  }
  // The answer is there already: the kernel works it out within the call.
  alignas(nlmsghdr) char answer[4096];
  const ssize_t got = recv(kernel.get(), answer, sizeof(answer), MSG_DONTWAIT);
  if (got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg)))) return std::nullopt;
  nlmsghdr header;
  std::memcpy(&header, answer, sizeof(header));
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return std::nullopt;
  inet_diag_msg found;
  std::memcpy(&found, answer + NLMSG_HDRLEN, sizeof(found));
  return found;
}

}  // namespace

TcpEnd TcpEnd::Of(const sockaddr_storage& address) {
  TcpEnd end;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    end.ip = MapIpv4(v4.sin_addr);
    end.port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    std::memcpy(end.ip.data(), &v6.sin6_addr, end.ip.size());
    end.port = ntohs(v6.sin6_port);
    end.interface = v6.sin6_scope_id;
  }
  return end;
}

bool TcpEnd::IsIpv4() const { return std::equal(kMapped.begin(), kMapped.end(), ip.begin()); }

std::string TcpEnd::Text() const {
  char host[INET6_ADDRSTRLEN] = "";
  if (IsIpv4()) {
    inet_ntop(AF_INET, &ip[kMapped.size()], host, sizeof(host));
    return absl::StrCat(host, ":", port);
  }
  inet_ntop(AF_INET6, ip.data(), host, sizeof(host));
  return absl::StrCat("[", host, "]:", port);
}

bool CanFindOwners() {
  static std::atomic<bool> can{false};
  if (can.load()) return true;
  // To ask may make the kernel look for its module, so a no holds for a second.
  static std::atomic<std::uint64_t> cannot_until_ns{0};
  if (MonotonicNowNs() < cannot_until_ns.load()) return false;
  // It must find a socket that is there.
  const UniqueFd listens(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(v4);
  TcpEnd nobody;
  nobody.ip = MapIpv4(in_addr{});
  if (listens.valid() && bind(listens.get(), any, size) == 0 && listen(listens.get(), 1) == 0 &&
      getsockname(listens.get(), any, &size) == 0 && Ask(TcpEnd::Of(address), nobody).has_value()) {
    can.store(true);
  } else {
    cannot_until_ns.store(MonotonicNowNs() + 1'000'000'000);
  }
  return can.load();
}

std::optional<std::uint32_t> OwnerOf(const TcpEnd& own, const TcpEnd& other) {
  const auto found = Ask(own, other);
  if (!found.has_value() || found->idiag_state != TCP_ESTABLISHED) return std::nullopt;
  return found->idiag_uid;
}

}  // namespace gradsync::daemon
