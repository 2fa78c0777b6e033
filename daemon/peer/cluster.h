// The nodes of one job key, as its coordinator sees them: one engine between them, and the order of
// what they launch on it.
//
// Gate: a job launches a bucket only when every rank of every node has marked it ready, and every
// node of the engine gets every launch, in one order. So what is launched by any is launched by
// all, no launch waits for a straggler, and a trainer's death leaves none half done: the engine
// outlives the job's generations, as long as the nodes are the same.
//
// Thread-safe. Lock order: Cluster::mutex_, then NodeExchange's and the links' queues. Jobs, their
// operations' done() and the links' Flush() are called without it.

#ifndef DAEMON_PEER_CLUSTER_H_
#define DAEMON_PEER_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/mutex.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/job/job.h"
#include "daemon/peer/node_exchange.h"
#include "daemon/peer/node_link.h"
#include "daemon/peer/rendezvous.h"
#include "daemon/rpc/other_nodes.h"

namespace gradsync {

// How an engine is made. Blocks until the nodes have met.
struct EngineSpec {
  std::uint32_t node = 0;
  std::vector<std::string> node_names;
  std::string address;  // of this node, for the others
  EngineSettings settings;
  RendezvousStore* store = nullptr;
  // As GlooOptions has it.
  std::function<void(const absl::Status&)> failed;
};
using EngineMaker = std::function<absl::StatusOr<std::unique_ptr<Engine>>(const EngineSpec&)>;

// What the nodes of a daemon's clusters share; all outlive them.
struct ClusterEnvironment {
  std::string node_name;
  std::string address;  // where this node's engines listen; empty: as the others reach it
  EngineSettings engine;
  EngineMaker make_engine;
  Executor* reaper = nullptr;  // aborts and destroys engines, each at once
  const Clock* clock = nullptr;
};

class Cluster : public std::enable_shared_from_this<Cluster> {
 public:
  Cluster(JobKey key, ClusterEnvironment environment);

  const JobKey& key() const { return key_; }

  // A rank of `job` is on the node of `link`, under this number. Before any of its messages.
  void AddRank(const std::shared_ptr<Job>& job, std::uint32_t rank,
               const std::shared_ptr<NodeLink>& link, std::uint64_t incarnation);

  // Connects the engine of a job that has formed, before it is needed; forgets jobs that are over.
  void Tick();

  // From the nodes. INVALID_ARGUMENT MALFORMED ends that node's stream. What is about an epoch that
  // has ended is ignored: the node may not know yet.
  absl::Status LaunchDone(NodeLink* link, const v1::LaunchDone& message);
  absl::Status RendezvousSet(NodeLink* link, const v1::RendezvousSet& message);
  absl::Status RendezvousGet(const std::shared_ptr<NodeLink>& link,
                             const v1::RendezvousGet& message);
  // The node is about to go, and has no ranks any more. Once what is in flight is done its stream
  // is closed, and the others meet without it; nothing is launched in between.
  void Detach(const std::shared_ptr<NodeLink>& link);
  // The node is gone; its ranks have been lost to their jobs.
  void Lost(NodeLink* link, const absl::Status& why);

  // No job.
  bool Idle();
  // Lets go of its engine; nothing is launched any more.
  void Shutdown();
  // How many engines have been made.
  std::uint64_t epochs();
  std::vector<std::shared_ptr<Job>> Jobs();
  // For status.
  JobNodes NodesOf(const Job& job);

 private:
  class JobReducer;
  struct Seat {
    std::shared_ptr<NodeLink> link;
    std::uint64_t incarnation = 0;
  };
  struct InFlight {
    ReduceOperation* operation = nullptr;
    std::shared_ptr<Job> job;
    std::set<const NodeLink*> waiting;  // null: this node
    absl::Status failure;
    BucketNumbers numbers;
    bool has_numbers = false;
    std::uint64_t start_ns = 0;
  };
  // One engine and what is on its way there. The exchange is aborted and destroyed on the reaper
  // alone: where the last reference goes may be one of the engine's own threads.
  struct Epoch {
    std::uint64_t number = 0;
    std::vector<std::shared_ptr<NodeLink>> links;  // nodes 1, 2, ...; this one is node 0
    std::vector<std::string> node_names;
    std::shared_ptr<Rendezvous> store;
    std::unique_ptr<NodeExchange> exchange;
    std::uint64_t sequence = 0;
    std::map<std::uint64_t, InFlight> in_flight;
    absl::Status failure;
    // It failed with nothing in flight, then: Tick() makes it the failure.
    absl::Status suspicion;
    std::uint64_t suspected_ns = 0;
    bool retired = false;  // nothing is launched on it any more
    bool reaped = false;   // the exchange is the reaper's
    int users = 0;         // that call the exchange without the lock
  };
  struct Entry {
    std::weak_ptr<Job> job;
    std::map<std::uint32_t, Seat> seats;
    bool failing = false;  // its engine has failed: it is about to be ended
  };
  using Links = std::vector<std::shared_ptr<NodeLink>>;
  struct Held {
    std::shared_ptr<Job> job;
    ReduceOperation* operation = nullptr;
  };

  struct Launched {
    Links told;  // to be flushed
    std::uint64_t epoch = 0;
    std::uint64_t sequence = 0;
    absl::Status submitted;  // here
  };

  void Launch(Job* raw, ReduceOperation* operation);
  // False after Shutdown().
  bool LaunchLocked(const std::shared_ptr<Job>& job, ReduceOperation* operation, const Entry& entry,
                    Launched* launched) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Links LinksOfLocked(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null after Shutdown(). Nodes that there is something to say to are added to `told`.
  std::shared_ptr<Epoch> EpochForLocked(const Links& links, Links* told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The jobs go on without ranks there.
  void ForgetLocked(const NodeLink* link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets the nodes go that want to, if nothing is in flight, and launches what was held for that.
  void Release();
  // Nothing is launched on it any more.
  void RetireLocked(const std::shared_ptr<Epoch>& epoch, Links* told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Epoch> FindLocked(std::uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static bool TakesPart(const Epoch& epoch, const NodeLink* link);
  // MALFORMED unless `link` (null: this node) is one of the epoch's nodes.
  absl::Status CheckNodeOf(const Epoch& epoch, const NodeLink* link, absl::string_view what) const;
  absl::StatusOr<std::shared_ptr<Rendezvous>> StoreOf(std::uint64_t number, const NodeLink* link);
  // `link` (null: this node) no longer touches the launch's memory.
  absl::Status Done(std::uint64_t number, NodeLink* link, std::uint64_t sequence,
                    const absl::Status& status, const BucketNumbers& numbers, bool measured);
  // The engine has failed, as `link` (null: this node) says. With nothing in flight that may be the
  // end of a node, which its stream tells better, and which a job may survive: it is waited for.
  absl::Status Suspect(std::uint64_t number, const NodeLink* link, const absl::Status& why);
  void Fail(std::uint64_t number, const absl::Status& why);
  void ReapLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobKey key_;
  const ClusterEnvironment environment_;

  Mutex mutex_;
  std::map<const Job*, Entry> jobs_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Epoch> current_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Epoch>> retired_ ABSL_GUARDED_BY(mutex_);  // until nothing is owed
  Links detaching_ ABSL_GUARDED_BY(mutex_);
  std::vector<Held> held_ ABSL_GUARDED_BY(mutex_);  // launches, while some node is detaching
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t last_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace gradsync

#endif  // DAEMON_PEER_CLUSTER_H_
