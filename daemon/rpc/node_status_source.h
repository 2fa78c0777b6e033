// The state of other nodes for GetStatus, as plain values. The peer room provides it.

#ifndef DAEMON_RPC_NODE_STATUS_SOURCE_H_
#define DAEMON_RPC_NODE_STATUS_SOURCE_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/job/job.h"

namespace gradsync::daemon {

// Another node of a job that this daemon coordinates.
struct NodeSnapshot {
  std::string name;
  std::string address;
  std::uint64_t heard_ns = 0;  // time of its last message
  std::vector<std::uint32_t> ranks;
};

// This node's part in an engine.
struct EngineSnapshot {
  std::uint64_t epoch = 0;
  std::vector<std::string> node_names;
  EngineSettings settings;
  bool encrypted = false;
  std::optional<EngineStatistics> statistics;  // none: the engine has not connected yet
};

// The nodes of a job that this daemon coordinates.
struct JobNodes {
  std::vector<NodeSnapshot> others;  // all but this one, sorted by their first rank
  std::optional<EngineSnapshot> engine;
};

// A job that another node coordinates, with ranks on this node.
struct RemoteJobSnapshot {
  uid_t uid = 0;
  std::string job_id;
  std::string coordinator;  // "host:port"
  std::string node_name;    // of the coordinator; empty until it has answered
  bool connected = false;
  std::uint64_t heard_ns = 0;            // time of the coordinator's last message
  std::set<std::uint64_t> incarnations;  // of the ranks' sessions here
  std::optional<EngineSnapshot> engine;
};

// The user and the ranks' sessions of such a job. Refers to the job's own data.
struct RemoteJobOwners {
  uid_t uid = 0;
  const std::string& job_id;
  const std::set<std::uint64_t>& incarnations;
};
// Says whether a job is wanted. It is called with a lock held, so it takes no lock.
using RemoteJobFilter = absl::FunctionRef<bool(const RemoteJobOwners&)>;

// Thread-safe.
class NodeStatusSource {
 public:
  virtual ~NodeStatusSource() = default;
  virtual JobNodes NodesOf(const Job& job) = 0;
  // Copies only the jobs that are wanted, so the other ones cost the asker nothing.
  virtual std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter wanted) = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_NODE_STATUS_SOURCE_H_
