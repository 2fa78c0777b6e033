// The first bytes of a connection between the engines of two nodes. With them the connecting node
// shows that it knows the other node's secret. They also have the number of the connecting node,
// and that of the connection: its channel, which is not a channel of the job.

#ifndef DAEMON_ENGINE_PEER_HELLO_H_
#define DAEMON_ENGINE_PEER_HELLO_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "daemon/engine/stored_peer.h"

namespace gradsync::daemon {

struct PeerHello {
  std::uint32_t node = 0;  // the one that connects
  std::uint32_t channel = 0;
};

// The secret of the node that accepts, then node and channel (4 bytes each, little-endian).
inline constexpr std::size_t kPeerHelloBytes = kPeerTokenBytes + 8;

// `token` has kPeerTokenBytes bytes.
std::string EncodePeerHello(absl::string_view token, const PeerHello& hello);

// Nullopt unless `bytes` are kPeerHelloBytes that begin with `token`. Takes the same time for every
// wrong token. Node and channel may be any numbers.
std::optional<PeerHello> DecodePeerHello(absl::string_view bytes, absl::string_view token);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_HELLO_H_
