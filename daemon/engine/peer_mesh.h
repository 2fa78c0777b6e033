// One TCP connection between every two nodes of an engine.

#ifndef DAEMON_ENGINE_PEER_MESH_H_
#define DAEMON_ENGINE_PEER_MESH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

struct PeerMeshOptions {
  std::uint32_t node = 0;
  std::uint32_t nodes = 0;
  std::vector<std::string> node_names;  // for messages
  std::string address;                  // of this node, numeric
  std::string agreement;                // the settings as a line of text, the same on every node
  std::uint64_t deadline_ns = 0;        // CLOCK_MONOTONIC
  RendezvousStore* store = nullptr;     // keys "watch/N" are set
};

// Returns the connections by node, without one to this node: non-blocking, with TCP_NODELAY. A node
// shows a token from the store when it connects; connections without that token are closed.
//
// FAILED_PRECONDITION  a node's agreement differs
// DEADLINE_EXCEEDED    ENGINE_TIMEOUT: names the nodes that have not connected
// UNAVAILABLE          an address cannot be bound or reached; or the store's error
absl::StatusOr<std::vector<UniqueFd>> ConnectPeers(const PeerMeshOptions& options);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_PEER_MESH_H_
