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
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/clock.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/engine_errors.h"
#include "daemon/engine/local_address.h"
#include "daemon/engine/peer_hello.h"
#include "daemon/engine/socket_owner.h"
#include "daemon/engine/stored_peer.h"

namespace gradsync::daemon {
namespace {

// The acceptor's answer to a PeerHello.
constexpr char kWelcome = 1;
// The most bytes of another node's agreement that an error shows.
constexpr std::size_t kMaxShownBytes = 256;
// How long a connection may take to show the token.
constexpr std::uint64_t kHelloLimitNs = 5'000'000'000;
// More connections than this, and two for each that is still to come, are a crowd.
constexpr std::size_t kCrowd = 64;
// How often a node tries to connect whose connection is closed before it is welcome.
constexpr int kTries = 20;
constexpr int kTryAgainMs = 20;

using Mesh = std::vector<std::vector<PeerStream>>;  // by channel, by node

struct Listener {
  UniqueFd fd;
  std::string token;  // kPeerTokenBytes
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
      listen(listener.fd.get(), SOMAXCONN) != 0) {
    return Errno(absl::StrCat("listen on ", options.address));
  }
  char token[kPeerTokenBytes];
  if (getrandom(token, sizeof(token), 0) != static_cast<ssize_t>(sizeof(token))) {
    return Errno("getrandom");
  }
  listener.token.assign(token, sizeof(token));
  return listener;
}

absl::StatusOr<StoredPeer> Describe(const PeerMeshOptions& options, std::uint32_t node) {
  const std::string& name = options.node_names[node];
  const absl::StatusOr<std::string> value = options.store->Get(Key(node), Left(options));
  if (absl::IsDeadlineExceeded(value.status())) {
    return EngineTimeout(name, "has not begun to connect");
  }
  if (!value.ok()) return value.status();
  absl::StatusOr<StoredPeer> peer = DecodeStoredPeer(*value);
  if (!peer.ok()) {
    return absl::UnavailableError(
        absl::StrCat("node ", name, " has stored a malformed address: ", peer.status().message()));
  }
  if (peer->agreement != options.agreement) {
    return absl::FailedPreconditionError(
        absl::StrCat("the nodes' engines differ: node ", name, " has ",
                     absl::CHexEscape(absl::string_view(peer->agreement).substr(0, kMaxShownBytes)),
                     ", node ", options.node_names[options.node], " has ", options.agreement));
  }
  return peer;
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

// ---- The connecting side

// Waits for the socket. ENGINE_TIMEOUT at the deadline.
absl::Status AwaitStream(const PeerMeshOptions& options, const PeerStream& stream, short events,
                         const std::string& name) {
  std::vector<pollfd> polled = {{stream.fd(), events, 0}};
  const absl::StatusOr<bool> ready = AwaitAny(options, &polled);
  if (!ready.ok()) return ready.status();
  return *ready ? absl::OkStatus() : EngineTimeout(name, "cannot be reached");
}

absl::StatusOr<UniqueFd> Dial(const PeerMeshOptions& options, const StoredPeer& peer,
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
  return fd;
}

// Shows certificate and token, and waits until it is welcome. `broken`: the connection's own
// failure; the returned status: any other.
absl::Status Introduce(const PeerMeshOptions& options, const std::string& hello,
                       const std::string& name, PeerStream* stream, absl::Status* broken) {
  for (;;) {
    const absl::StatusOr<bool> done = stream->Handshake();
    if (!done.ok()) *broken = done.status();
    if (!done.ok() || *done) break;
    if (absl::Status status = AwaitStream(options, *stream, POLLIN, name); !status.ok()) {
      return status;
    }
  }
  for (std::size_t sent = 0; broken->ok() && sent < hello.size();) {
    const absl::StatusOr<std::size_t> wrote =
        stream->Write(hello.data() + sent, hello.size() - sent);
    if (!wrote.ok()) *broken = wrote.status();
    if (wrote.ok()) sent += *wrote;
    if (!wrote.ok() || *wrote > 0) continue;
    if (absl::Status status = AwaitStream(options, *stream, POLLOUT, name); !status.ok()) {
      return status;
    }
  }
  char welcome = 0;
  while (broken->ok()) {
    const absl::StatusOr<std::size_t> got = stream->Read(&welcome, 1);
    if (!got.ok()) *broken = got.status();
    if (!got.ok()) break;
    if (*got == 1) {
      // An alert of TLS, for example, if only that node has certificates.
      if (welcome != kWelcome) *broken = absl::UnavailableError("its answer is no welcome");
      break;
    }
    if (absl::Status status = AwaitStream(options, *stream, POLLIN, name); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PeerStream> ConnectTo(const PeerMeshOptions& options, const StoredPeer& peer,
                                     const std::string& name, std::uint32_t channel) {
  const std::string hello = EncodePeerHello(peer.token, {options.node, channel});
  for (int left = kTries;; --left) {
    absl::StatusOr<UniqueFd> fd = Dial(options, peer, name);
    if (!fd.ok()) return fd.status();
    PeerStream stream(*std::move(fd), options.tls.get(), PeerStream::Role::kConnects);
    absl::Status broken;
    absl::Status status = Introduce(options, hello, name, &stream, &broken);
    if (!status.ok()) return status;
    if (broken.ok()) return stream;
    if (left == 1) return PeerLost(name, broken.message());
    if (absl::Status cancelled = options.store->Cancelled(); !cancelled.ok()) return cancelled;
    poll(nullptr, 0, std::min(LeftMs(options), kTryAgainMs));
  }
}

// ---- The accepting side

// A connection that has not shown the token.
struct Stranger {
  PeerStream stream;
  std::uint64_t until_ns = 0;
  bool connected = false;  // the handshake of TLS is done
  std::string hello;
  CallerKey caller;
};

// Goes on as far as bytes have come. True if there is nothing more to wait for. The stream is
// closed if nothing more comes.
bool Advance(Stranger* stranger) {
  if (!stranger->connected) {
    const absl::StatusOr<bool> done = stranger->stream.Handshake();
    if (!done.ok()) stranger->stream.Close();
    if (!done.ok()) return true;
    if (!*done) return false;
    stranger->connected = true;
  }
  while (stranger->hello.size() < kPeerHelloBytes) {
    char bytes[kPeerHelloBytes];
    const absl::StatusOr<std::size_t> got =
        stranger->stream.Read(bytes, kPeerHelloBytes - stranger->hello.size());
    if (!got.ok()) stranger->stream.Close();
    if (!got.ok()) return true;
    if (*got == 0) return false;
    stranger->hello.append(bytes, *got);
  }
  return true;
}

// Accepts the connections of the nodes above this one.
class Acceptor {
 public:
  // Fills `mesh`. All of it outlives this.
  Acceptor(const PeerMeshOptions& options, const Listener& listener, Mesh* mesh)
      : options_(options), listener_(listener), mesh_(*mesh) {}

  absl::Status Run() {
    missing_ = std::size_t{options_.nodes - options_.node - 1} * options_.channels;
    while (missing_ > 0) {
      std::vector<pollfd> polled = {{listener_.fd.get(), POLLIN, 0}};
      for (const Stranger& stranger : strangers_) {
        polled.push_back({stranger.stream.fd(), POLLIN, 0});
      }
      // A node that is lost before the others have come.
      const std::size_t first = polled.size();
      std::vector<std::uint32_t> admitted;
      for (const auto& peers : mesh_) {
        for (std::uint32_t node = options_.node + 1; node < options_.nodes; ++node) {
          if (!peers[node].valid()) continue;
          polled.push_back({peers[node].fd(), POLLRDHUP, 0});
          admitted.push_back(node);
        }
      }
      const absl::StatusOr<bool> ready = AwaitAny(options_, &polled);
      if (!ready.ok()) return ready.status();
      if (!*ready) return Missing();
      for (std::size_t i = 0; i < admitted.size(); ++i) {
        if (polled[first + i].revents == 0) continue;
        return PeerLost(options_.node_names[admitted[i]], "its connection was closed");
      }
      const std::uint64_t now_ns = MonotonicNowNs();
      for (std::size_t i = 0; i < strangers_.size(); ++i) {
        Stranger& stranger = strangers_[i];
        if (polled[i + 1].revents != 0 && Advance(&stranger)) Admit(&stranger);
        if (now_ns >= stranger.until_ns) stranger.stream.Close();
      }
      strangers_.erase(
          std::remove_if(strangers_.begin(), strangers_.end(),
                         [](const Stranger& stranger) { return !stranger.stream.valid(); }),
          strangers_.end());
      if (polled[0].revents != 0) Accept(now_ns);
    }
    return absl::OkStatus();
  }

 private:
  void Accept(std::uint64_t now_ns) {
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    UniqueFd fd(accept4(listener_.fd.get(), reinterpret_cast<sockaddr*>(&peer), &length,
                        SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      // The connection stays in the queue, so the next look finds it with a free descriptor.
      if ((errno == EMFILE || errno == ENFILE) && !strangers_.empty()) DropOne();
      return;
    }
    if (strangers_.size() >= kCrowd + 2 * missing_) DropOne();
    const CallerKey caller = CallerKeyOf(TcpEnd::Of(peer).ip, CallerPlaceOf(fd.get(), peer));
    SendAtOnce(fd.get());
    strangers_.push_back({PeerStream(std::move(fd), options_.tls.get(), PeerStream::Role::kAccepts),
                          now_ns + kHelloLimitNs, options_.tls == nullptr, "", caller});
  }

  // Closes the oldest connection of the largest caller. So one caller's crowd closes no other
  // caller's connections.
  void DropOne() {
    std::vector<CallerKey> callers;
    for (const Stranger& stranger : strangers_) callers.push_back(stranger.caller);
    const CallerKey largest = LargestOf(callers);
    strangers_.erase(
        std::find_if(strangers_.begin(), strangers_.end(),
                     [&](const Stranger& stranger) { return stranger.caller == largest; }));
  }

  // Keeps the connection if it is one that is still to come, else closes it.
  void Admit(Stranger* stranger) {
    PeerStream stream = std::move(stranger->stream);
    const auto hello = DecodePeerHello(stranger->hello, listener_.token);
    if (!stream.valid() || !hello.has_value() || hello->node <= options_.node ||
        hello->node >= options_.nodes || hello->channel >= options_.channels) {
      return;
    }
    PeerStream& place = mesh_[hello->channel][hello->node];
    const bool again = place.valid();
    // A new connection's buffer holds it.
    const absl::StatusOr<std::size_t> welcomed = stream.Write(&kWelcome, 1);
    if (!welcomed.ok() || *welcomed != 1) return;
    // A node that tries again has lost its first connection.
    place = std::move(stream);
    if (!again) --missing_;
  }

  absl::Status Missing() const {
    std::vector<std::string> names;
    for (std::uint32_t node = options_.node + 1; node < options_.nodes; ++node) {
      const bool all = std::all_of(mesh_.begin(), mesh_.end(),
                                   [node](const auto& peers) { return peers[node].valid(); });
      if (!all) names.push_back(options_.node_names[node]);
    }
    return EngineTimeout(absl::StrJoin(names, ", "), "has not connected");
  }

  const PeerMeshOptions& options_;
  const Listener& listener_;
  Mesh& mesh_;
  std::size_t missing_ = 0;  // connections
  std::deque<Stranger> strangers_;
};

// Connects to the nodes below this one.
absl::Status ConnectToOthers(const PeerMeshOptions& options, Mesh* mesh) {
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    if (node == options.node) continue;
    const absl::StatusOr<StoredPeer> peer = Describe(options, node);
    if (!peer.ok()) return peer.status();
    if (node > options.node) continue;
    for (std::uint32_t channel = 0; channel < options.channels; ++channel) {
      absl::StatusOr<PeerStream> stream =
          ConnectTo(options, *peer, options.node_names[node], channel);
      if (!stream.ok()) return stream.status();
      (*mesh)[channel][node] = *std::move(stream);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::vector<PeerStream>>> ConnectPeers(const PeerMeshOptions& options) {
  absl::StatusOr<Listener> listener = Listen(options);
  if (!listener.ok()) return listener.status();
  absl::Status status = options.store->Set(
      Key(options.node), EncodeStoredPeer(options.address, LocalPort(listener->fd.get()),
                                          listener->token, options.agreement));
  if (!status.ok()) return status;
  Mesh mesh(options.channels);
  for (auto& peers : mesh) peers.resize(options.nodes);
  status = ConnectToOthers(options, &mesh);
  if (status.ok()) status = Acceptor(options, *listener, &mesh).Run();
  if (!status.ok()) return status;
  return mesh;
}

}  // namespace gradsync::daemon
