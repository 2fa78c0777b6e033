// The engines of all nodes, in one process.

#ifndef TESTS_ENGINE_ENGINE_CLUSTER_H_
#define TESTS_ENGINE_ENGINE_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/tcp_engine.h"
#include "tests/engine/memory_store.h"

namespace gradsync::daemon {

// Connects all nodes over 127.0.0.1, each on a thread of its own. `change` may change a node's
// options.
std::vector<absl::StatusOr<std::unique_ptr<TcpEngine>>> ConnectAll(
    const TcpOptions& options,
    const std::function<void(std::uint32_t node, TcpOptions* options)>& change = nullptr);

// Connects the engines of all nodes and returns them. On an error, fails the test and returns none.
std::vector<std::unique_ptr<Engine>> TcpCluster(const TcpOptions& options);

// Options for nodes on 127.0.0.1. Node k has the name "node-k".
TcpOptions LoopbackAddresses(std::uint32_t nodes);

}  // namespace gradsync::daemon

#endif  // TESTS_ENGINE_ENGINE_CLUSTER_H_
