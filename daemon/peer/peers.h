// This daemon among those of other nodes: finds the node that coordinates a rank's job, listens for
// the nodes of the jobs that it coordinates itself, and notices when either is gone.

#ifndef DAEMON_PEER_PEERS_H_
#define DAEMON_PEER_PEERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/cluster.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/other_nodes.h"

namespace gradsync {

// Where daemons listen for each other by default.
inline constexpr std::uint16_t kDefaultPeerPort = 7417;

struct PeerOptions {
  std::string listen;     // host or host:port; port 0: any
  std::string node_name;  // empty: the host's
  // PEM files; all or none.
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_ca;
  std::string tls_name;  // in the others' certificates; empty: the address that they are called by
  std::uint64_t staging_bytes = 0;
  std::size_t max_message_bytes = std::size_t{16} << 20;
  DecodeLimits limits;
  EngineSettings engine;  // of jobs that are coordinated here
  std::uint64_t reach_patience_ns = 20'000'000'000;
  std::size_t quota_jobs_per_user = 64;  // that other nodes coordinate
  // As WorkerSupervisorOptions has it, for workers of other nodes.
  std::uint64_t worker_idle_limit_ns = 60'000'000'000;
};

// All outlive it.
struct PeerEnvironment {
  JobTable* jobs = nullptr;
  Executor* executor = nullptr;  // lets go of sessions' memory
  const Clock* clock = nullptr;
  EngineMaker make_engine;
};

// Thread-safe. Threads of its own: two that take messages, one that ticks, one for each engine that
// is being ended.
class Peers final : public JobFinder, public OtherNodes {
 public:
  // Listens. INVALID_ARGUMENT or UNAVAILABLE says what is wrong with the address or the files.
  static absl::StatusOr<std::unique_ptr<Peers>> Start(const PeerOptions& options,
                                                      const PeerEnvironment& environment);
  // Its sessions and jobs have ended, or end now.
  ~Peers() override;

  void Join(const JoinRequest& request, std::shared_ptr<SessionSink> sink,
            std::function<void(absl::StatusOr<Joined>)> joined) override;

  // Of the jobs that other nodes coordinate, ends the sessions of those none of whose ranks here
  // has begun a step whose verdict it does not know, and lets jobs that have none left here go on
  // without this node. True: that were all.
  bool EndIdle(const absl::Status& why);
  // Ends the sessions of jobs that other nodes coordinate, and takes no more nodes.
  void EndAll(const absl::Status& why);

  // "host:port" that is listened on.
  const std::string& address() const;
  const std::string& node_name() const;
  // What an operator should look at in the configuration, and what to know of it.
  const std::vector<std::string>& warnings() const;
  const std::vector<std::string>& notices() const;

  JobNodes NodesOf(const Job& job) override;
  std::vector<RemoteJobSnapshot> RemoteJobs() override;
  // Engines made for jobs that are coordinated here, or elsewhere.
  std::uint64_t engines_made() const;

 private:
  class Impl;
  explicit Peers(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// `given`, or the host's name.
std::string NodeName(const std::string& given);

// Gloo, as the nodes' engines use it.
absl::StatusOr<std::unique_ptr<Engine>> MakeGlooEngine(const EngineSpec& spec);

}  // namespace gradsync

#endif  // DAEMON_PEER_PEERS_H_
