#include "daemon/peer/peer_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/borrowed_socket.h"
#include "daemon/base/logging.h"
#include "daemon/engine/caller.h"
#include "daemon/peer/local_caller.h"

namespace gradsync::daemon {
namespace {

constexpr int kBacklog = 1024;
// Time until it tries again when the process or the machine has run out of something.
constexpr int kRetryMs = 100;

void SetOption(int socket, int level, int option) {
  const int on = 1;
  setsockopt(socket, level, option, &on, sizeof(on));
}

std::uint16_t PortOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string TextOf(const sockaddr_storage& address) {
  char host[NI_MAXHOST];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), host, sizeof(host),
                  nullptr, 0, NI_NUMERICHOST) != 0) {
    return "unknown";
  }
  return host;
}

void SetPort(sockaddr* address, std::uint16_t port) {
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port);
  }
}

// Why accept4() failed: the connection, or the lack of something that may come back.
bool RanOut(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerListener>> PeerListener::Listen(const PeerAddress& address,
                                                                   ConnectionLimit::Bounds bounds) {
  const auto cannot = [&](const char* why) {
    return absl::UnavailableError(
        absl::StrCat("peer_listen: cannot listen on ", address.Text(), ": ", why));
  };
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* resolved = nullptr;
  const int failed =
      getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &resolved);
  if (failed != 0) return cannot(gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(resolved, freeaddrinfo);
  std::unique_ptr<PeerListener> listener(new PeerListener(bounds));
  listener->stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener->stop_.valid()) return cannot(std::strerror(errno));
  listener->port_ = address.port;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    UniqueFd fd(socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) return cannot(std::strerror(errno));
    SetOption(fd.get(), SOL_SOCKET, SO_REUSEADDR);
    SetOption(fd.get(), IPPROTO_TCP, TCP_NODELAY);  // connections inherit it
    if (one->ai_family == AF_INET6) {
      const int off = 0;  // "::" means IPv4 too
      setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    SetPort(one->ai_addr, listener->port_);
    if (bind(fd.get(), one->ai_addr, one->ai_addrlen) != 0 || listen(fd.get(), kBacklog) != 0) {
      return cannot(std::strerror(errno));
    }
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
      return cannot(std::strerror(errno));
    }
    listener->port_ = PortOf(bound);
    listener->sockets_.push_back(std::move(fd));
  }
  if (listener->sockets_.empty()) return cannot("the host has no address");
  return listener;
}

PeerListener::~PeerListener() { Stop(); }

void PeerListener::Start(std::function<void(UniqueFd connection)> connected) {
  connected_ = std::move(connected);
  thread_ = std::thread([this] { Loop(); });
}

CallerKey PeerListener::CallerAt(absl::string_view address) {
  const TcpEnd end = EndOfCaller(address).value_or(TcpEnd{});
  const auto open = limit_.CallerAt(std::string(end.ip.begin(), end.ip.end()), end.port);
  // Otherwise the connection has ended.
  return open.value_or(CallerKey(end.ip, std::nullopt));
}

std::shared_ptr<ClientInput> PeerListener::InputOf(absl::string_view caller) {
  const TcpEnd end = EndOfCaller(caller).value_or(TcpEnd{});
  return limit_.InputOf(std::string(end.ip.begin(), end.ip.end()), end.port);
}

std::size_t PeerListener::UnreadBytes(absl::string_view caller) {
  const TcpEnd end = EndOfCaller(caller).value_or(TcpEnd{});
  return limit_.UnreadBytes(std::string(end.ip.begin(), end.ip.end()), end.port);
}

std::vector<TcpEnd> PeerListener::OwnEnds(absl::string_view caller) {
  std::vector<TcpEnd> ends;
  const std::optional<TcpEnd> other = EndOfCaller(caller);
  if (!other.has_value()) return ends;
  const std::string ip(other->ip.begin(), other->ip.end());
  for (const sockaddr_storage& own : limit_.OwnEnds(ip, other->port)) {
    ends.push_back(TcpEnd::Of(own));
  }
  return ends;
}

void PeerListener::EndSlow(std::uint64_t limit_ns, std::uint64_t few) {
  TcpEnd slow;
  {
    MutexLock lock(&mutex_);
    if (connecting_ns_ == 0 || clock_.NowNs() < connecting_ns_ + limit_ns ||
        connecting_socket_.ReceivedBytes() <= few) {
      return;
    }
    slow = connecting_;
  }
  if (End(std::string(slow.ip.begin(), slow.ip.end()), slow.port)) {
    LogLimited(LogLevel::kWarning, "peer port: connection ended",
               {{"address", slow.Text()},
                {"why", "it sends without a pause, so that no other one can be accepted"}});
  }
}

void PeerListener::Stop() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  while (write(stop_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  limit_.EndAll();  // also ends `connected`
  thread_.join();
  sockets_.clear();
}

void PeerListener::Loop() {
  std::vector<pollfd> watched = {{stop_.get(), POLLIN, 0}};
  for (const UniqueFd& socket : sockets_) watched.push_back({socket.get(), POLLIN, 0});
  bool ran_out = false;
  for (;;) {
    // Without what an accept needs, it waits for the stop alone.
    if (ran_out) poll(watched.data(), 1, kRetryMs);
    const int ready = poll(watched.data(), watched.size(), ran_out ? 0 : -1);
    if (ready < 0) continue;  // a signal
    if (watched[0].revents != 0) return;
    const bool had_run_out = std::exchange(ran_out, false);
    for (std::size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents == 0) continue;
      const std::string why = Accept(watched[i].fd);
      if (why.empty()) continue;
      if (!had_run_out && !ran_out) {
        LogLimited(LogLevel::kError, "peer port: cannot accept connections now", {{"why", why}});
      }
      ran_out = true;
    }
  }
}

std::string PeerListener::Accept(int socket) {
  if (descriptors_ != nullptr && descriptors_->scarce()) return "few file descriptors are left";
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  UniqueFd connection(
      accept4(socket, reinterpret_cast<sockaddr*>(&peer), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection.valid()) return RanOut(errno) ? std::strerror(errno) : "";
  const absl::Status admitted =
      limit_.Admit(connection.get(), peer, [&] { return CallerPlaceOf(connection.get(), peer); });
  if (!admitted.ok()) {
    LogLimited(LogLevel::kWarning, "peer port: connection refused",
               {{"address", TextOf(peer)}, {"why", admitted.message()}});
    return "";
  }
  if (most_calls_ > 0) BorrowedSocket(connection.get()).LimitHeaders(HeaderFrames(most_calls_));
  {
    MutexLock lock(&mutex_);
    connecting_socket_ = BorrowedSocket(connection.get());
    connecting_ = TcpEnd::Of(peer);
    connecting_ns_ = clock_.NowNs();
  }
  connected_(std::move(connection));
  MutexLock lock(&mutex_);
  connecting_ns_ = 0;
  return "";
}

}  // namespace gradsync::daemon
