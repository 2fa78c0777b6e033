// One engine between the nodes of a job, on the node that coordinates the job, and the launches in
// flight on it.

#ifndef DAEMON_PEER_ENGINE_EPOCH_H_
#define DAEMON_PEER_ENGINE_EPOCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/executor.h"
#include "daemon/base/tenant.h"
#include "daemon/base/user_executor.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_settings.h"
#include "daemon/engine/peer_tls_keys.h"
#include "daemon/peer/node_exchange.h"
#include "daemon/peer/node_link.h"
#include "daemon/peer/rendezvous.h"
#include "daemon/peer/user_rate.h"
#include "daemon/reduce/launch_ledger.h"
#include "daemon/reduce/reducer.h"

namespace gradsync::daemon {

// The arguments of an EngineMaker, which makes an engine and blocks until every node has connected.
struct EngineSpec {
  Tenant user;  // it counts for this user
  std::uint32_t node = 0;
  std::vector<std::string> node_names;
  std::string address;  // of this node, for the others
  EngineSettings settings;
  std::shared_ptr<const PeerTlsKeys> keys;  // null: clear text
  RendezvousStore* store = nullptr;
  // As in EngineOptions.
  std::function<void(const absl::Status&)> failed;
  std::shared_ptr<void> counted;
};
using EngineMaker = std::function<absl::StatusOr<std::unique_ptr<Engine>>(const EngineSpec&)>;

// The environment that all node groups of a daemon share. Its objects outlive them.
struct NodeGroupEnvironment {
  std::string node_name;
  std::string address;  // where this node's engines listen; empty: the address the others reach
  EngineSettings engine;
  EngineMaker make_engine;
  bool encrypted = false;            // the engines' connections have TLS; for status
  Executor* reaper = nullptr;        // aborts and destroys engines, each on a thread of its own
  UserExecutor* executor = nullptr;  // launches what a message leaves over, until Shutdown()
  const Clock* clock = nullptr;
  ArenaQuota* memory = nullptr;  // is charged for what the daemon keeps; null: nothing is
  MeetingRate* rate = nullptr;   // of new engines; null: any
};

// A rank on another node, and the link to that node.
struct LinkedRank {
  std::shared_ptr<NodeLink> link;
  std::uint64_t incarnation = 0;  // of its session there
};
using LinkedRanks = std::map<std::uint32_t, LinkedRank>;  // by rank
using NodeLinks = std::vector<std::shared_ptr<NodeLink>>;

// Every node gets every launch, in one order, and answers each once.
//
// Not thread-safe: NodeGroup guards it with its mutex. Only Abort() is called without it. Messages
// are queued on the links; the caller flushes them. Shared with the callbacks of NodeGroup; the
// engine itself is destroyed on the reaper (Reap), since a thread of the engine may drop the last
// reference.
class EngineEpoch {
 public:
  // Called when this node has finished its part of a launch. nullopt: this node has measured
  // nothing.
  using LaunchDone = std::function<void(std::uint64_t launch, const absl::Status&,
                                        const std::optional<GradientStats>&)>;

  // Tells the nodes of `links` (nodes 1, 2, ...; this one is node 0) to connect, and connects this
  // node's engine for a job of `user`. `failed` may be called by the engine from then on, on any
  // thread.
  EngineEpoch(std::uint64_t epoch, const Tenant& user, NodeLinks links,
              const NodeGroupEnvironment& environment,
              std::function<void(const absl::Status&)> failed);

  std::uint64_t epoch() const { return epoch_; }
  const NodeLinks& links() const { return links_; }
  const std::vector<std::string>& node_names() const { return node_names_; }
  const EngineSettings& settings() const { return settings_; }
  const std::shared_ptr<Rendezvous>& store() const { return store_; }
  std::optional<EngineStatistics> Statistics() const { return exchange_->Statistics(); }
  bool Includes(const NodeLink* link) const;

  // Whether every rank of the operation is on this node or in `ranks`.
  static bool HasEveryRank(const ReduceOperation& operation, const LinkedRanks& ranks);
  // Launches on every node. Calls `done` once when this node has finished. If the returned status
  // is not OK, this node does nothing and `done` is not called, but every node, including this one,
  // still owes an answer to *launch. `account`: of the owner.
  absl::Status Launch(ReduceOperation* operation, std::shared_ptr<void> owner,
                      const MemoryAccount& account, const LinkedRanks& ranks,
                      const LaunchDone& done, std::uint64_t* launch);
  // Participants are the nodes' links; null is this node.
  LaunchLedger& ledger() { return ledger_; }

  // Not OK once the epoch has failed or ended: nothing more is launched.
  const absl::Status& failure() const { return failure_; }
  void Fail(const absl::Status& why);
  // A node answers a launch a moment after the others. When its engine has failed, it answers once
  // its workers on GPUs have ended.
  static constexpr std::uint64_t kLateNs = 300'000'000'000;
  static constexpr std::uint64_t kLateAfterFailureNs = 120'000'000'000;
  // The other nodes that have not answered a launch for so long after another node has, or after
  // the failure. A node may answer pings and nothing else.
  NodeLinks LateNodes() const;
  // Notes that the engine seems to have failed; the first reason counts. SuspectedFor() returns
  // that reason once `patience_ns` have passed, else OK.
  void Suspect(const absl::Status& why);
  absl::Status SuspectedFor(std::uint64_t patience_ns) const;
  // Tells the nodes that the epoch has ended.
  void End();
  // Fails this node's part of the launches in flight; LaunchDone may be called from within. Call it
  // without a lock, between BeginUse() and EndUse().
  void Abort(const absl::Status& why) { exchange_->Abort(why); }
  void BeginUse() { ++users_; }
  void EndUse() { --users_; }

  // Has `reaper` destroy the engine of `epoch`, once no one uses it. The reaper first waits for
  // this node's part of the launches in flight.
  static void Reap(const std::shared_ptr<EngineEpoch>& epoch, Executor* reaper);
  bool reaped() const { return reaped_; }

 private:
  void QueueConnect();
  // Gives this node's part of a launch to the engine. RESOURCE_EXHAUSTED: the user has no memory
  // left for a broadcast that only passes through here.
  absl::Status Submit(NodeWork work, const MemoryAccount& account);

  const std::uint64_t epoch_;
  const std::string node_name_;  // of this node
  const NodeLinks links_;
  const EngineSettings settings_;        // this node's, but no more than every node allows
  std::vector<std::string> node_names_;  // of every node; constant after construction
  const std::shared_ptr<Rendezvous> store_ = std::make_shared<Rendezvous>();
  std::unique_ptr<NodeExchange> exchange_;  // the reaper's once reaped_
  LaunchLedger ledger_;
  const Clock* const clock_;
  absl::Status failure_;
  std::uint64_t failed_ns_ = 0;
  absl::Status suspicion_;
  std::uint64_t suspected_ns_ = 0;
  bool reaped_ = false;
  int users_ = 0;  // threads that call the exchange without the lock
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_ENGINE_EPOCH_H_
