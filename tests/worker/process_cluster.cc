#include "tests/worker/process_cluster.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/engine/memory_store.h"

namespace gradsync::daemon {

EngineOptions ProcessOptions(std::uint32_t nodes) {
  EngineOptions options;
  options.nodes = nodes;
  for (std::uint32_t node = 0; node < nodes; ++node) {
    options.node_names.push_back(absl::StrCat("node-", node));
  }
  options.address = "127.0.0.1";
  return options;
}

std::vector<absl::StatusOr<std::unique_ptr<EngineProcess>>> ConnectProcesses(
    const EngineOptions& options,
    const std::function<void(std::uint32_t node, EngineOptions* options)>& change) {
  MemoryStore store;
  std::vector<absl::StatusOr<std::unique_ptr<EngineProcess>>> engines(options.nodes);
  std::vector<std::thread> threads;
  for (std::uint32_t node = 0; node < options.nodes; ++node) {
    threads.emplace_back([&, node] {
      EngineOptions mine = options;
      mine.node = node;
      mine.store = &store;
      if (change) change(node, &mine);
      WorkerProcessOptions process;
      process.program = "daemon/gradsyncd";
      engines[node] = EngineProcess::Connect(mine, process);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return engines;
}

}  // namespace gradsync::daemon
