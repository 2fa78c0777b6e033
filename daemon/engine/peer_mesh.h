// The connections between the nodes of an engine.

#ifndef DAEMON_ENGINE_PEER_MESH_H_
#define DAEMON_ENGINE_PEER_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/peer_stream.h"
#include "daemon/engine/peer_tls.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

struct PeerMeshOptions {
  std::uint32_t node = 0;
  std::uint32_t nodes = 0;
  std::uint32_t channels = 1;           // connections between every two nodes
  std::vector<std::string> node_names;  // for messages
  std::string address;                  // of this node, numeric
  std::string agreement;                // the settings as a line of text, the same on every node
  std::uint64_t deadline_ns = 0;        // CLOCK_MONOTONIC
  RendezvousStore* store = nullptr;     // keys "watch/N" are set
  std::shared_ptr<PeerTls> tls;         // null: clear text
};

// Returns the connections by channel, then by node, without one to this node. They have
// TCP_NODELAY.
//
// The listening port is open until every node has connected. A node that connects proves its
// certificate, if there is TLS, then shows a secret of 32 bytes, which the job's nodes know from
// the store. It has 5 s for that. Other connections are closed. If too many connections have not
// shown the secret yet, one of them is closed: the oldest one of the caller that LargestOf()
// (caller.h) returns for them. A node whose connection is closed tries again.
//
// FAILED_PRECONDITION  a node's agreement differs
// DEADLINE_EXCEEDED    ENGINE_TIMEOUT: names the nodes that have not connected
// UNAVAILABLE          an address cannot be bound or reached; or the store's error
absl::StatusOr<std::vector<std::vector<PeerStream>>> ConnectPeers(const PeerMeshOptions& options);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_MESH_H_
