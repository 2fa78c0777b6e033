// The engine processes of all nodes, on this machine.

#ifndef TESTS_WORKER_PROCESS_CLUSTER_H_
#define TESTS_WORKER_PROCESS_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/worker/engine_process.h"

namespace gradsync::daemon {

// Options for `nodes` nodes on 127.0.0.1. Node k has the name "node-k".
EngineOptions ProcessOptions(std::uint32_t nodes);

// Connects all nodes, each on a thread of its own. `change` may change a node's options.
std::vector<absl::StatusOr<std::unique_ptr<EngineProcess>>> ConnectProcesses(
    const EngineOptions& options,
    const std::function<void(std::uint32_t node, EngineOptions* options)>& change = nullptr);

}  // namespace gradsync::daemon

#endif  // TESTS_WORKER_PROCESS_CLUSTER_H_
