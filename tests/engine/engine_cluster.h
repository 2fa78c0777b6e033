// The engines of all nodes, in one process.

#ifndef TESTS_ENGINE_ENGINE_CLUSTER_H_
#define TESTS_ENGINE_ENGINE_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/gloo_engine.h"
#include "tests/engine/memory_store.h"

namespace gradsync {

// Connects all nodes over 127.0.0.1, each on a thread of its own; `change` may alter one's options.
std::vector<absl::StatusOr<std::unique_ptr<GlooEngine>>> ConnectAll(
    const GlooOptions& options,
    const std::function<void(std::uint32_t node, GlooOptions* options)>& change = nullptr);

// The engines of nodes that connect without a fault; a test failure, and none, otherwise.
std::vector<std::unique_ptr<Engine>> GlooCluster(const GlooOptions& options);

// Node k is called "node-k".
GlooOptions LoopbackAddresses(std::uint32_t nodes);

}  // namespace gradsync

#endif  // TESTS_ENGINE_ENGINE_CLUSTER_H_
