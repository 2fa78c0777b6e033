// This daemon's connections to the daemons of other nodes. For a local rank it finds the node that
// coordinates its job. For the jobs that are coordinated here it listens for other nodes. It
// notices when either side is lost.

#ifndef DAEMON_PEER_PEER_SERVICE_H_
#define DAEMON_PEER_PEER_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/node_group.h"
#include "daemon/reduce/turn_gate.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/node_status_source.h"
#include "daemon/session/descriptor_quota.h"
#include "daemon/worker/engine_priorities.h"

namespace gradsync::daemon {

struct PeerOptions {
  std::string listen;        // host or host:port; port 0: any free one
  std::string coordinators;  // the daemons to dial: see CoordinatorList
  std::string node_name;     // empty: the host's name
  // PEM files. Give all three or none.
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_ca;
  std::string tls_name;  // in the others' certificates; empty: the address that is dialed
  bool gpus = true;      // this daemon looks for GPUs
  DecodeLimits limits;
  // For jobs that are coordinated here. Its lanes and chunks are also the most that a coordinator
  // of another node may ask for.
  EngineSettings engine;
  std::size_t quota_jobs_per_user = 64;  // of jobs that other nodes coordinate
  // As in WorkerSupervisorOptions, for workers of other nodes.
  std::uint64_t worker_idle_limit_ns = 60'000'000'000;
};

// All of it outlives the PeerService.
struct PeerEnvironment {
  JobTable* jobs = nullptr;
  ArenaQuota* memory = nullptr;  // as JobEnvironment::memory
  // Is charged for the engines between nodes; null: nothing is.
  ArenaQuota* engine_memory = nullptr;
  UserExecutor* executor = nullptr;  // frees sessions' memory
  const Clock* clock = nullptr;
  EngineMaker make_engine;
  const DescriptorQuota* descriptors = nullptr;  // null: they are never scarce
  // Called several times a second while somebody is connected to the peer port; null: nobody asks.
  std::function<void()> used;
};

// Thread-safe. Owned by the daemon. It owns the connections and has threads of its own: one that
// accepts connections, one that watches them, two that read messages, two for the turns of users,
// two that launch the rest of large steps, one that ticks, and one for each engine that is being
// destroyed.
class PeerService final : public JobFinder, public NodeStatusSource {
 public:
  // Reads and validates what Start() needs before it listens, and keeps nothing. Fails as Start()
  // does.
  static absl::Status Check(const PeerOptions& options);
  // Starts to listen. INVALID_ARGUMENT or UNAVAILABLE says what is wrong with the address or the
  // files.
  static absl::StatusOr<std::unique_ptr<PeerService>> Start(const PeerOptions& options,
                                                            const PeerEnvironment& environment);
  // Ends sessions and jobs that have not ended.
  ~PeerService() override;

  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) override;

  // Ends the sessions of jobs that other nodes coordinate, unless a rank here has begun a step
  // whose verdict is unknown. Tells the coordinators of jobs without ranks here to continue without
  // this node. Call it until it returns true: no job is left. After the first call no rank can join
  // such a job.
  bool EndIdle(const absl::Status& why);
  // Ends the sessions of all jobs that other nodes coordinate, and accepts no more nodes.
  void EndAll(const absl::Status& why);

  // "host:port" that it listens on.
  const std::string& address() const;
  const std::string& node_name() const;
  // What an operator should change in the configuration, and what an operator should know.
  const std::vector<std::string>& warnings() const;
  const std::vector<std::string>& notices() const;

  JobNodes NodesOf(const Job& job) override;
  std::vector<RemoteJobSnapshot> RemoteJobs(RemoteJobFilter wanted) override;
  // How many engines it has made, for jobs that are coordinated here or elsewhere.
  std::uint64_t engines_made() const;

 private:
  class Impl;
  explicit PeerService(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// `given`, or the host's name if that is empty.
std::string NodeName(const std::string& given);

// The EngineMaker of the daemon: makes an EngineProcess. `gate` and `priorities` share the CPUs
// between users (EngineUser), and outlive it.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngineProcess(const EngineSpec& spec, TurnGate* gate,
                                                          EnginePriorities* priorities);

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_PEER_SERVICE_H_
