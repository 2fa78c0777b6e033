// One TCP connection between every two nodes of an engine.

#ifndef DAEMON_ENGINE_PEER_MESH_H_
#define DAEMON_ENGINE_PEER_MESH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync {

struct PeerMeshOptions {
  std::uint32_t node = 0;
  std::uint32_t nodes = 0;
  std::vector<std::string> node_names;  // for messages
  std::string address;                  // of this node, numeric
  std::string agreement;                // a line of text that must be the same on every node
  std::uint64_t deadline_ns = 0;        // CLOCK_MONOTONIC
  RendezvousStore* store = nullptr;     // keys "watch/N" are set
};

// The connections by node (none to this one): non-blocking, without delay. Strangers that connect
// meanwhile are turned away: whoever connects shows a token from the store.
//
// FAILED_PRECONDITION  a node's agreement differs
// DEADLINE_EXCEEDED    ENGINE_TIMEOUT, naming who has not come
// UNAVAILABLE          an address cannot be bound or reached, or what the store says
absl::StatusOr<std::vector<UniqueFd>> ConnectPeers(const PeerMeshOptions& options);

}  // namespace gradsync

#endif  // DAEMON_ENGINE_PEER_MESH_H_
