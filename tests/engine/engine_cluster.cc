#include "tests/engine/engine_cluster.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

TcpOptions LoopbackAddresses(std::uint32_t nodes) {
  TcpOptions options;
  options.nodes = nodes;
  for (std::uint32_t node = 0; node < nodes; ++node) {
    options.node_names.push_back(absl::StrCat("node-", node));
  }
  options.address = "127.0.0.1";
  return options;
}

std::vector<absl::StatusOr<std::unique_ptr<TcpEngine>>> ConnectAll(
    const TcpOptions& options,
    const std::function<void(std::uint32_t node, TcpOptions* options)>& change) {
  MemoryStore store;
  std::vector<absl::StatusOr<std::unique_ptr<TcpEngine>>> engines(options.nodes);
  std::vector<std::thread> threads;
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    threads.emplace_back([&, node] {
      TcpOptions mine = options;
      mine.node = node;
      mine.store = &store;
      if (change) change(node, &mine);
      engines[node] = TcpEngine::Connect(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return engines;
}

std::vector<std::unique_ptr<Engine>> TcpCluster(const TcpOptions& options) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& engine : ConnectAll(options)) {
    if (!engine.ok()) {
      ADD_FAILURE() << engine.status();
      return {};
    }
    engines.push_back(*std::move(engine));
  }
  return engines;
}

}  // namespace gradsync::daemon
