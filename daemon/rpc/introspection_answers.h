// Answers the Introspection service, which shows the daemon's state to operators. It reads
// snapshots and changes nothing.

#ifndef DAEMON_RPC_INTROSPECTION_ANSWERS_H_
#define DAEMON_RPC_INTROSPECTION_ANSWERS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job_table.h"
#include "daemon/rpc/connections.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/session/session_table.h"
#include "daemon/worker/gpu_reducer.h"
#include "daemon/worker/worker_supervisor.h"
#include "gradsync/v1/introspection.pb.h"

namespace gradsync::daemon {

// Says whether a user is wanted. It is called with a lock held, so it takes no lock.
using TenantFilter = absl::FunctionRef<bool(const Tenant&)>;

// Constant. Its objects outlive the answers.
struct IntrospectionContext {
  SessionTable* sessions = nullptr;
  JobTable* jobs = nullptr;
  const ArenaQuota* quota = nullptr;
  const ArenaQuota* gpu_quota = nullptr;
  ArenaQuota* control_quota = nullptr;
  const ArenaQuota* engine_quota = nullptr;
  const Clock* clock = nullptr;
  std::uint64_t started_ns = 0;
  std::string version;
  std::string socket;
  std::uint32_t reduce_threads = 0;
  std::string simd;
  std::string gate;                          // option `gate`
  WorkerSupervisor* workers = nullptr;       // null: no GPUs
  const GpuReducer* gpu_reducer = nullptr;   // null: no job is on GPUs
  NodeStatusSource* nodes = nullptr;         // null: no other nodes
  const Connections* connections = nullptr;  // null: there are none
  // The open calls of the users that are wanted. Thread-safe. Null: there are none.
  std::function<std::map<Tenant, std::uint64_t>(TenantFilter wanted)> open_calls;
  std::string peer_address;
  std::string node_name;
  PodId pod;                       // of the daemon itself
  bool pod_root_sees_all = false;  // option `pod_root_sees_all`
  // About the configuration.
  std::vector<std::string> warnings;
  std::vector<std::string> notices;
};

// Thread-safe. Waits for at most a fraction of a second: for workers that report their memory.
class IntrospectionAnswers {
 public:
  explicit IntrospectionAnswers(IntrospectionContext context) : context_(std::move(context)) {}

  // `asker` sees the jobs of its user that have a rank in its pod. root in a pod sees every user's
  // jobs there. root and the daemon's own user see all jobs of the node, unless the asker is in
  // another pod than the daemon, or its place is unknown. With `pod_root_sees_all` they always do.
  v1::GetStatusResponse Status(const ClientProcess& asker,
                               const v1::GetStatusRequest& request) const;
  v1::GetStatsResponse Stats(const ClientProcess& asker, const v1::GetStatsRequest& request) const;
  // NOT_FOUND: the asker has no such job, or the job has no such layout.
  absl::StatusOr<v1::GetTimelineResponse> Timeline(const ClientProcess& asker,
                                                   const v1::GetTimelineRequest& request) const;

 private:
  // The jobs that the asker may see, in the order of JobTable::Jobs(). An empty `job_id` asks for
  // all.
  std::vector<std::shared_ptr<Job>> Visible(const ClientProcess& asker,
                                            const std::string& job_id) const;
  bool SeesAll(const ClientProcess& asker) const;
  // The gate between the job's GPUs. Empty if the job has none between GPUs.
  std::string GateOf(const JobIdentity& job) const;
  // `jobs`: the keys of the jobs that the asker may see; null: it sees all.
  void FillCuda(const std::set<std::string>* jobs, const std::string& job_id,
                v1::GetStatusResponse* response) const;
  void FillUsers(const ClientProcess& asker, v1::GetStatusResponse* response) const;

  const IntrospectionContext context_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_INTROSPECTION_ANSWERS_H_
