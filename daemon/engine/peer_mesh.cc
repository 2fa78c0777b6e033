#include "daemon/engine/peer_mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "daemon/base/clock.h"
#include "daemon/engine/engine_errors.h"
#include "daemon/engine/local_address.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kTokenBytes = 16;
// The acceptor's token, then the connecting node's number (4 bytes, little-endian).
constexpr std::size_t kHelloBytes = kTokenBytes + 4;

struct Listener {
  UniqueFd fd;
  std::string token;  // kTokenBytes
};

// A node, as its value in the store describes it: "address port token", a newline, the agreement.
struct Peer {
  SocketAddress address;
  std::string token;
};

absl::Status Errno(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

std::string Key(std::uint32_t node) { return absl::StrCat("watch/", node); }

absl::Duration Left(const PeerMeshOptions& options) {
  const std::uint64_t now = MonotonicNowNs();
  return absl::Nanoseconds(options.deadline_ns > now ? options.deadline_ns - now : 0);
}

// Milliseconds for poll, rounded up.
int LeftMs(const PeerMeshOptions& options) {
  return static_cast<int>(std::min<std::int64_t>(
      1'000'000, absl::ToInt64Milliseconds(Left(options) + absl::Nanoseconds(999'999))));
}

absl::StatusOr<Listener> Listen(const PeerMeshOptions& options) {
  const absl::StatusOr<SocketAddress> address = ParseAddress(options.address, 0);
  if (!address.ok()) return address.status();
  Listener listener;
  listener.fd =
      UniqueFd(socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.fd.valid() || bind(listener.fd.get(), address->get(), address->length) != 0 ||
      listen(listener.fd.get(), static_cast<int>(2 * options.nodes)) != 0) {
    return Errno(absl::StrCat("listen on ", options.address));
  }
  char token[kTokenBytes];
  if (getrandom(token, sizeof(token), 0) != static_cast<ssize_t>(sizeof(token))) {
    return Errno("getrandom");
  }
  listener.token.assign(token, sizeof(token));
  return listener;
}

absl::StatusOr<Peer> Describe(const PeerMeshOptions& options, std::uint32_t node) {
  const std::string& name = options.node_names[node];
  const absl::StatusOr<std::string> value = options.store->Get(Key(node), Left(options));
  if (absl::IsDeadlineExceeded(value.status())) {
    return EngineTimeout(name, "has not begun to connect");
  }
  if (!value.ok()) return value.status();
  const std::pair<std::string, std::string> lines =
      absl::StrSplit(*value, absl::MaxSplits('\n', 1));
  const std::vector<std::string> words = absl::StrSplit(lines.first, ' ');
  std::uint32_t port = 0;
  if (words.size() != 3 || !absl::SimpleAtoi(words[1], &port) || port > 65535) {
    return absl::UnavailableError(absl::StrCat("node ", name, " has stored a malformed address"));
  }
  if (lines.second != options.agreement) {
    return absl::FailedPreconditionError(
        absl::StrCat("the nodes' engines differ: node ", name, " has ", lines.second, ", node ",
                     options.node_names[options.node], " has ", options.agreement));
  }
  absl::StatusOr<SocketAddress> address = ParseAddress(words[0], static_cast<std::uint16_t>(port));
  if (!address.ok()) return address.status();
  return Peer{*address, absl::HexStringToBytes(words[2])};
}

// Waits until one of the descriptors is ready; false at the deadline. Also asks the store whether
// the nodes still want to connect, since the daemon's shutdown waits for this.
absl::StatusOr<bool> AwaitAny(const PeerMeshOptions& options, std::vector<pollfd>* polled) {
  constexpr int kLookMs = 50;
  while (true) {
    if (absl::Status cancelled = options.store->Cancelled(); !cancelled.ok()) return cancelled;
    const int left_ms = LeftMs(options);
    const int ready = poll(polled->data(), polled->size(), std::min(left_ms, kLookMs));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return Errno("poll");
    if (ready == 0 && left_ms == 0) return false;
  }
}

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<UniqueFd> ConnectTo(const PeerMeshOptions& options, const Peer& peer,
                                   const std::string& name) {
  UniqueFd fd(
      socket(peer.address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return Errno("socket");
  if (connect(fd.get(), peer.address.get(), peer.address.length) != 0) {
    if (errno != EINPROGRESS) return PeerLost(name, std::strerror(errno));
    std::vector<pollfd> connected = {{fd.get(), POLLOUT, 0}};
    const absl::StatusOr<bool> ready = AwaitAny(options, &connected);
    if (!ready.ok()) return ready.status();
    if (!*ready) return EngineTimeout(name, "cannot be reached");
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return PeerLost(name, std::strerror(error));
  }
  SendAtOnce(fd.get());
  std::string hello = peer.token;
  for (int i = 0; i < 4; ++i) hello.push_back(static_cast<char>(options.node >> (8 * i)));
  // A new connection's buffer holds it.
  if (send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(hello.size())) {
    return PeerLost(name, "it did not accept this node's hello");
  }
  return fd;
}

// A connection whose hello has not arrived whole.
struct Stranger {
  UniqueFd fd;
  std::string hello;
};

// Reads on; true if there is nothing more to wait for. fd is closed if nothing more comes.
bool ReadHello(Stranger* stranger) {
  char bytes[kHelloBytes];
  const ssize_t got = recv(stranger->fd.get(), bytes, kHelloBytes - stranger->hello.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) {
    stranger->fd.reset();
    return true;
  }
  stranger->hello.append(bytes, static_cast<std::size_t>(got));
  return stranger->hello.size() == kHelloBytes;
}

// The node that `hello` shows; this one if it is none that is still to come.
std::uint32_t NodeOfHello(const PeerMeshOptions& options, const std::string& token,
                          const std::vector<UniqueFd>& peers, const std::string& hello) {
  if (hello.size() != kHelloBytes || hello.compare(0, kTokenBytes, token) != 0) {
    return options.node;
  }
  std::uint32_t node = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    node |= std::uint32_t{static_cast<unsigned char>(hello[kTokenBytes + i])} << (8 * i);
  }
  const bool expected = node > options.node && node < options.nodes && !peers[node].valid();
  return expected ? node : options.node;
}

absl::Status Missing(const PeerMeshOptions& options, const std::vector<UniqueFd>& peers) {
  std::vector<std::string> names;
  for (std::uint32_t node = options.node + 1; node < options.nodes; ++node) {
    if (!peers[node].valid()) names.push_back(options.node_names[node]);
  }
  return EngineTimeout(absl::StrJoin(names, ", "), "has not connected");
}

// The connection of every node above this one.
absl::Status AcceptPeers(const PeerMeshOptions& options, const Listener& listener,
                         std::vector<UniqueFd>* peers) {
  std::size_t missing = options.nodes - options.node - 1;
  std::deque<Stranger> strangers;
  while (missing > 0) {
    std::vector<pollfd> polled = {{listener.fd.get(), POLLIN, 0}};
    for (const Stranger& stranger : strangers) {
      polled.push_back({stranger.fd.get(), POLLIN, 0});
    }
    const absl::StatusOr<bool> ready = AwaitAny(options, &polled);
    if (!ready.ok()) return ready.status();
    if (!*ready) return Missing(options, *peers);
    for (std::size_t i = 0; i < strangers.size(); ++i) {
      Stranger& stranger = strangers[i];
      if (polled[i + 1].revents == 0 || !ReadHello(&stranger)) continue;
      const std::uint32_t node = NodeOfHello(options, listener.token, *peers, stranger.hello);
      if (stranger.fd.valid() && node != options.node) {
        SendAtOnce(stranger.fd.get());
        (*peers)[node] = std::move(stranger.fd);
        --missing;
      }
      stranger.fd.reset();
    }
    strangers.erase(std::remove_if(strangers.begin(), strangers.end(),
                                   [](const Stranger& stranger) { return !stranger.fd.valid(); }),
                    strangers.end());
    if (polled[0].revents != 0) {
      UniqueFd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      // The oldest goes, should a crowd come.
      if (strangers.size() >= 4 * std::size_t{options.nodes}) strangers.pop_front();
      if (fd.valid()) strangers.push_back({std::move(fd), ""});
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> ConnectPeers(const PeerMeshOptions& options) {
  absl::StatusOr<Listener> listener = Listen(options);
  if (!listener.ok()) return listener.status();
  absl::Status status = options.store->Set(
      Key(options.node),
      absl::StrCat(options.address, " ", LocalPort(listener->fd.get()), " ",
                   absl::BytesToHexString(listener->token), "\n", options.agreement));
  if (!status.ok()) return status;
  std::vector<UniqueFd> peers(options.nodes);
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    if (node == options.node) continue;
    const absl::StatusOr<Peer> peer = Describe(options, node);
    if (!peer.ok()) return peer.status();
    if (node > options.node) continue;
    absl::StatusOr<UniqueFd> fd = ConnectTo(options, *peer, options.node_names[node]);
    if (!fd.ok()) return fd.status();
    peers[node] = *std::move(fd);
  }
  status = AcceptPeers(options, *listener, &peers);
  if (!status.ok()) return status;
  return peers;
}

}  // namespace gradsync::daemon
