// The nodes of a job, on the node that coordinates it. Launches the job's operations between nodes
// on all of them, in one order.
//
// A job launches a bucket only when every rank of every node has marked it ready. Every node gets
// every launch. So no launch waits for a straggler, and a lost trainer leaves no launch half done.
// The engine outlives the job's generations, as long as the nodes stay the same.
//
// A message may make thousands of buckets ready. The thread of the message launches one piece of
// them. The executor launches the rest, one piece in each turn of the user.

#ifndef DAEMON_PEER_NODE_GROUP_H_
#define DAEMON_PEER_NODE_GROUP_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/base/mutex.h"
#include "daemon/base/tenant.h"
#include "daemon/job/job.h"
#include "daemon/peer/counted_ranks.h"
#include "daemon/peer/engine_epoch.h"
#include "daemon/peer/epoch_table.h"
#include "daemon/peer/node_link.h"
#include "daemon/rpc/node_status_source.h"

namespace gradsync::daemon {

// Thread-safe. Lock order: NodeGroup::mutex_, then those of NodeExchange, of the links' queues and
// of the executor. It calls jobs, their operations' done() and the links' Flush() and Close()
// without its lock (Actions). The reducers that it gives to its jobs own it.
class NodeGroup : public std::enable_shared_from_this<NodeGroup> {
 public:
  NodeGroup(JobKey key, NodeGroupEnvironment environment);

  const JobKey& key() const { return key_; }

  // A rank of `job` is on the node of `link`, where its session has this incarnation. Call it
  // before any message of the rank.
  void AddRank(const std::shared_ptr<Job>& job, std::uint32_t rank,
               const std::shared_ptr<NodeLink>& link, std::uint64_t incarnation);

  // Connects the engine of a job that has formed, before it is needed. Forgets jobs that have
  // ended.
  void Tick();

  // Messages of the nodes. INVALID_ARGUMENT MALFORMED ends that node's stream. A message about an
  // epoch that has ended is ignored: the node may not know it yet.
  absl::Status LaunchDone(NodeLink* link, const v1::LaunchDone& message);
  absl::Status RendezvousSet(NodeLink* link, const v1::RendezvousSet& message);
  absl::Status RendezvousGet(const std::shared_ptr<NodeLink>& link,
                             const v1::RendezvousGet& message);
  // The node has no ranks any more, and wants to leave. When everything in flight is done, its
  // stream is closed and the others connect without it. Nothing is launched in between.
  void Detach(const std::shared_ptr<NodeLink>& link);
  // The node is lost. The caller has already told the jobs that the node's ranks are lost.
  void Lost(NodeLink* link, const absl::Status& why);

  // What it needs a node for.
  enum class Need : std::uint8_t {
    kNothing,
    kEngine,  // the node is part of the engine, which waits for its job to start again
    kRanks,   // the node has ranks in a job, or had some that have left it
  };
  Need NeedOf(const NodeLink* link);

  // True if it has no job.
  bool Idle();
  // Ends the engine. Nothing is launched any more.
  void Shutdown();
  // How many engines it has made.
  std::uint64_t engines_made();
  std::vector<std::shared_ptr<Job>> Jobs();
  // For status.
  JobNodes NodesOf(const Job& job);

 private:
  class JobReducer;
  // A job, and its ranks on other nodes.
  struct Entry {
    explicit Entry(RankCounts* counts) : ranks(counts) {}

    std::weak_ptr<Job> job;
    CountedRanks ranks;
    absl::Status failure;  // of its engine: the job is about to be ended
  };
  // The launches that one call has asked for, or a part of them.
  struct Launches {
    std::shared_ptr<Job> job;
    absl::InlinedVector<ReduceOperation*, 8> operations;
    bool ended = false;  // the job has ended
  };
  using Piece = absl::InlinedVector<Launches, 1>;
  struct Refused {
    std::shared_ptr<Job> job;
    ReduceOperation* operation = nullptr;
    absl::Status why;
  };
  struct FailedEpoch {
    std::shared_ptr<EngineEpoch> epoch;
    std::set<std::shared_ptr<Job>> jobs;
  };
  // Calls that must be made without the lock, in this order.
  struct Actions {
    std::vector<FailedEpoch> failed;
    std::vector<std::pair<std::shared_ptr<Job>, absl::Status>> ended;  // and why
    NodeLinks flush;
    NodeLinks close;
    NodeLinks late;  // closed, too, by name
    std::vector<Refused> refused;
    std::vector<LaunchRecord> finished;
  };

  void Launch(Job* job, absl::Span<ReduceOperation* const> operations);
  // Does what can be done now: closes the nodes that want to leave, and launches a piece of what
  // waits. Leaves the rest to the executor.
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for one piece. True if the caller must go on: after Shutdown() no turn follows.
  bool LaunchPiece() ABSL_LOCKS_EXCLUDED(mutex_);
  // A turn of the executor.
  void TakeTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  void Run(Actions actions) ABSL_LOCKS_EXCLUDED(mutex_);

  void CloseLate(NodeLink* link) const;
  void CloseDetachingLocked(Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes as many launches from those that wait as one message or turn may cost.
  Piece TakePieceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchLocked(const Launches& launches, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OK if the operations may be launched.
  absl::Status WhyRefused(const Launches& launches, const Entry& entry) const;
  // What is called when this node has finished a launch of the epoch.
  EngineEpoch::LaunchDone DoneOf(std::uint64_t epoch);
  // As EpochTable::EpochFor().
  absl::StatusOr<std::shared_ptr<EngineEpoch>> EpochForLocked(const NodeLinks& links,
                                                              const JobIdentity& job,
                                                              Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The jobs continue without ranks on the node of `link`.
  void ForgetLocked(const NodeLink* link) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<std::shared_ptr<Rendezvous>> StoreOf(std::uint64_t epoch, const NodeLink* link);
  // `link` (null: this node) answers a launch.
  absl::Status Answered(std::uint64_t epoch, NodeLink* link, std::uint64_t launch,
                        LaunchAnswer answer);
  void AnswerLocked(const std::shared_ptr<EngineEpoch>& epoch, NodeLink* link, std::uint64_t launch,
                    const LaunchAnswer& answer, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `link` (null: this node) reports that the engine has failed. If a launch is in flight, the
  // engine fails at once. If none is, this only notes the report: the cause may be the end of a
  // node that the job does not need, and the end of that node's stream will show it. If no stream
  // ends, Tick() fails the engine soon.
  absl::Status Suspect(std::uint64_t epoch, const NodeLink* link, const absl::Status& why);
  void FailLocked(const std::shared_ptr<EngineEpoch>& epoch, const absl::Status& why,
                  Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const JobKey key_;
  const NodeGroupEnvironment environment_;

  Mutex mutex_;
  RankCounts rank_counts_ ABSL_GUARDED_BY(mutex_);  // before jobs_, whose destructor changes it
  std::map<const Job*, Entry> jobs_ ABSL_GUARDED_BY(mutex_);
  EpochTable epochs_ ABSL_GUARDED_BY(mutex_);
  NodeLinks detaching_ ABSL_GUARDED_BY(mutex_);
  std::set<const NodeLink*> late_ ABSL_GUARDED_BY(mutex_);  // closed, until they are lost
  // Launches that wait for their turn, or until a node has detached.
  std::deque<Launches> waiting_ ABSL_GUARDED_BY(mutex_);
  // The executor has a turn for waiting_: nobody else takes launches from it.
  bool has_turn_ ABSL_GUARDED_BY(mutex_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_GROUP_H_
