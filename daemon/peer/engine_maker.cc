#include "daemon/peer/peer_service.h"
#include "daemon/worker/engine_process.h"

namespace gradsync::daemon {

absl::StatusOr<std::unique_ptr<Engine>> MakeEngineProcess(const EngineSpec& spec, TurnGate* gate,
                                                          EnginePriorities* priorities) {
  EngineOptions options;
  static_cast<EngineSettings&>(options) = spec.settings;
  options.node = spec.node;
  options.nodes = static_cast<std::uint32_t>(spec.node_names.size());
  options.node_names = spec.node_names;
  options.address = spec.address;
  options.keys = spec.keys;
  options.store = spec.store;
  options.failed = spec.failed;
  options.counted = spec.counted;
  auto engine = EngineProcess::Connect(options, {}, {gate, priorities, spec.user});
  if (!engine.ok()) return engine.status();
  return *std::move(engine);
}

}  // namespace gradsync::daemon
