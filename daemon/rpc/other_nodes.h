// What is known of other nodes, as plain values: for status. The peer room knows it.

#ifndef DAEMON_RPC_OTHER_NODES_H_
#define DAEMON_RPC_OTHER_NODES_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/job/job.h"

namespace gradsync {

struct NodeSnapshot {
  std::string name;
  std::string address;
  std::uint64_t heard_ns = 0;  // its last word
  std::vector<std::uint32_t> ranks;
};

// This node's part in an engine.
struct EngineSnapshot {
  std::uint64_t epoch = 0;
  std::vector<std::string> node_names;
  EngineSettings settings;
  std::optional<EngineStatistics> statistics;  // none: the nodes have not met yet
};

// Of a job that is coordinated here.
struct JobNodes {
  std::vector<NodeSnapshot> others;  // attached, by their first rank
  std::optional<EngineSnapshot> engine;
};

// Of ranks here whose job is coordinated elsewhere.
struct RemoteJobSnapshot {
  uid_t uid = 0;
  std::string job_id;
  std::string coordinator;  // "host:port"
  std::string node_name;    // the coordinator's; empty until it has answered
  bool connected = false;
  std::uint64_t heard_ns = 0;
  std::set<std::uint64_t> incarnations;  // of the ranks' sessions here
  std::optional<EngineSnapshot> engine;
};

// Thread-safe.
class OtherNodes {
 public:
  virtual ~OtherNodes() = default;
  virtual JobNodes NodesOf(const Job& job) = 0;
  virtual std::vector<RemoteJobSnapshot> RemoteJobs() = 0;
};

}  // namespace gradsync

#endif  // DAEMON_RPC_OTHER_NODES_H_
