#include "tests/fault/fake_engine.h"

#include <poll.h>
#include <sys/socket.h>

#include <utility>

#include "daemon/engine/local_address.h"
#include "daemon/engine/peer_hello.h"
#include "daemon/engine/stored_peer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

// An address of this machine that no daemon of a test has.
constexpr char kAddress[] = "127.0.0.8";
constexpr char kWelcome = 1;

bool Readable(const Descriptor& socket) {
  pollfd polled = {socket.get(), POLLIN, 0};
  return poll(&polled, 1, kPatienceMs) == 1;
}

// True if so many bytes have come.
bool Receive(const Descriptor& socket, std::string* bytes, std::size_t count) {
  bytes->resize(count);
  return Readable(socket) &&
         recv(socket.get(), bytes->data(), count, MSG_WAITALL) == static_cast<ssize_t>(count);
}

}  // namespace

FakeEngine::FakeEngine(std::uint32_t node, std::uint32_t lanes)
    : node_(node),
      token_(daemon::kPeerTokenBytes, 'f'),
      listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      connections_(lanes + 1) {
  const daemon::SocketAddress any = daemon::ParseAddress(kAddress, 0).value();
  if (bind(listener_.get(), any.get(), any.length) != 0 ||
      listen(listener_.get(), SOMAXCONN) != 0) {
    listener_.Close();
  }
  port_ = daemon::LocalPort(listener_.get());
}

std::string FakeEngine::Stored(const std::string& other) const {
  const auto peer = daemon::DecodeStoredPeer(other);
  return peer.ok() ? daemon::EncodeStoredPeer(kAddress, port_, token_, peer->agreement) : "";
}

bool FakeEngine::Meet(const std::string& other) { return node_ == 0 ? Accept() : Connect(other); }

bool FakeEngine::Accept() {
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    if (!Readable(listener_)) return false;
    Descriptor one(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::string hello;
    if (one.get() < 0 || !Receive(one, &hello, daemon::kPeerHelloBytes)) return false;
    const auto decoded = daemon::DecodePeerHello(hello, token_);
    if (!decoded.has_value() || decoded->channel >= connections_.size()) return false;
    if (send(one.get(), &kWelcome, 1, MSG_NOSIGNAL) != 1) return false;
    connections_[decoded->channel] = std::move(one);
  }
  return true;
}

bool FakeEngine::Connect(const std::string& other) {
  const auto peer = daemon::DecodeStoredPeer(other);
  if (!peer.ok()) return false;
  for (std::uint32_t channel = 0; channel < connections_.size(); ++channel) {
    Descriptor one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const std::string hello = daemon::EncodePeerHello(peer->token, {node_, channel});
    std::string answer;
    if (connect(one.get(), peer->address.get(), peer->address.length) != 0 ||
        send(one.get(), hello.data(), hello.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(hello.size()) ||
        !Receive(one, &answer, 1) || answer[0] != kWelcome) {
      return false;
    }
    connections_[channel] = std::move(one);
  }
  return true;
}

void FakeEngine::Send(std::uint32_t connection, const std::string& bytes) const {
  (void)send(connections_.at(connection).get(), bytes.data(), bytes.size(),
             MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace gradsync::fault
