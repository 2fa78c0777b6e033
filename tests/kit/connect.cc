#include "tests/kit/connect.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>

namespace gradsync {
namespace {

sockaddr_in AddressOf(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

}  // namespace

Descriptor ConnectUnix(const std::string& path, int type) {
  Descriptor fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Descriptor();
  }
  return fd;
}

Descriptor ConnectTcp(const std::string& to, const std::string& from_host) {
  const std::size_t colon = to.rfind(':');
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in from = AddressOf(from_host, 0);
  const sockaddr_in address = AddressOf(to.substr(0, colon), std::stoi(to.substr(colon + 1)));
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Descriptor();
  }
  // Otherwise a second small message waits for some 40 ms.
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

Descriptor ListenTcp(const std::string& host, std::string* address) {
  Descriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in bound = AddressOf(host, 0);
  auto* const any = reinterpret_cast<sockaddr*>(&bound);
  socklen_t size = sizeof(bound);
  if (bind(fd.get(), any, size) != 0 || listen(fd.get(), SOMAXCONN) != 0 ||
      getsockname(fd.get(), any, &size) != 0) {
    return Descriptor();
  }
  *address = host + ":" + std::to_string(ntohs(bound.sin_port));
  return fd;
}

Descriptor AcceptOne(const Descriptor& listener, int timeout_ms) {
  pollfd waits{listener.get(), POLLIN, 0};
  if (poll(&waits, 1, timeout_ms) != 1) return Descriptor();
  return Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

}  // namespace gradsync
