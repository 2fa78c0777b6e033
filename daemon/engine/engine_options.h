// What a node must know to connect an engine.

#ifndef DAEMON_ENGINE_ENGINE_OPTIONS_H_
#define DAEMON_ENGINE_ENGINE_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/peer_tls_keys.h"
#include "daemon/engine/rendezvous_store.h"

namespace gradsync::daemon {

struct EngineOptions : EngineSettings {
  std::uint32_t node = 0;
  std::uint32_t nodes = 0;  // kMinEngineNodes to kMaxEngineNodes
  // By node, for error messages and the field "node" of errors. Default: the nodes' numbers.
  std::vector<std::string> node_names;

  // The address by which the other nodes reach this one, a name or a number. If empty, the address
  // of `interface`. Ports are ephemeral.
  std::string address;
  std::string interface;

  // Null: data travels in clear text. All nodes have keys, or none has.
  std::shared_ptr<const PeerTlsKeys> keys;

  absl::Duration connect_timeout = absl::Seconds(60);
  RendezvousStore* store = nullptr;  // used until Connect returns
  // Called at most once, on an engine's thread, when the engine fails, with or without pending
  // exchanges; not if Abort() is the cause. The call may come before Connect returns the same
  // error. May be empty.
  std::function<void(const absl::Status&)> failed;
  // Counts the engine: kept until it is destroyed. May be null.
  std::shared_ptr<void> counted;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_ENGINE_OPTIONS_H_
