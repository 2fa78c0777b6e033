// The Introspection service shows the daemon's state to operators. It reads snapshots and changes
// nothing.

#ifndef DAEMON_RPC_INTROSPECTION_SERVICE_H_
#define DAEMON_RPC_INTROSPECTION_SERVICE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/job/job_table.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/session/session_table.h"
#include "daemon/worker/gpu_reducer.h"
#include "daemon/worker/worker_supervisor.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace gradsync::daemon {

// Constant. Its objects outlive the service.
struct IntrospectionContext {
  SessionTable* sessions = nullptr;
  JobTable* jobs = nullptr;
  const ArenaQuota* quota = nullptr;
  const ArenaQuota* gpu_quota = nullptr;
  const Connections* connections = nullptr;
  const Clock* clock = nullptr;
  std::uint64_t started_ns = 0;
  std::string version;
  std::string socket;
  std::uint32_t reduce_threads = 0;
  std::string simd;
  std::string gate;                     // option `gate`
  WorkerSupervisor* workers = nullptr;  // null: no GPUs
  const GpuReducer* gpu_reducer = nullptr;
  NodeStatusSource* nodes = nullptr;  // null: no other nodes
  std::string peer_address;
  std::string node_name;
  // About the configuration.
  std::vector<std::string> warnings;
  std::vector<std::string> notices;
};

std::unique_ptr<grpc::Service> MakeIntrospectionService(IntrospectionContext context);

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_INTROSPECTION_SERVICE_H_
