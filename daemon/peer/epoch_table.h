// The engines between the nodes of a job, one after the other: the current one, and those that have
// ended but still wait for answers to launches.

#ifndef DAEMON_PEER_EPOCH_TABLE_H_
#define DAEMON_PEER_EPOCH_TABLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/job/job.h"
#include "daemon/peer/engine_epoch.h"

namespace gradsync::daemon {

// Not thread-safe: NodeGroup guards it with its mutex. It runs no callbacks. It queues messages on
// links and adds these links to `flush`; the caller flushes them. It shares the epochs with the
// callbacks of NodeGroup.
class EpochTable {
 public:
  // The engine of this epoch seems to have failed. Called on any thread.
  using Suspected = std::function<void(std::uint64_t epoch, const absl::Status& why)>;

  // `environment` outlives the table.
  EpochTable(std::string job_id, const NodeGroupEnvironment* environment)
      : job_id_(std::move(job_id)), environment_(environment) {}

  // The current epoch if it has these nodes and has not failed, else a new one. A new epoch is
  // counted for the address and network of its first node, and for the job's payer unless another
  // node has begun the job. It gets the callback that `suspected` returns. CANCELLED after Close().
  // RESOURCE_EXHAUSTED QUOTA: there were too many new ones; nothing changes.
  absl::StatusOr<std::shared_ptr<EngineEpoch>> EpochFor(const NodeLinks& links,
                                                        const JobIdentity& job,
                                                        absl::FunctionRef<Suspected()> suspected,
                                                        NodeLinks* flush);
  // Null: there is none.
  const std::shared_ptr<EngineEpoch>& current() const { return current_; }
  // The epoch with this number. Null if it has ended and every launch of it is answered. MALFORMED
  // unless `link` (null: this node), which sent `what`, is one of its nodes.
  absl::StatusOr<std::shared_ptr<EngineEpoch>> Find(std::uint64_t epoch, const NodeLink* link,
                                                    absl::string_view what) const;
  // The epochs, ended or current, that have this node. The current one comes last.
  std::vector<std::shared_ptr<EngineEpoch>> EpochsOf(const NodeLink* link) const;
  // The nodes that are late with answers: EngineEpoch::LateNodes(), of every epoch.
  NodeLinks LateNodes() const;
  // The rendezvous of this epoch. Null if the current epoch is another one. MALFORMED as in Find().
  absl::StatusOr<std::shared_ptr<Rendezvous>> StoreOf(std::uint64_t epoch,
                                                      const NodeLink* link) const;

  // Ends the current epoch, if there is one.
  void Retire(NodeLinks* flush);
  // Has the reaper destroy the engines that have ended and that no one uses. Forgets the epochs
  // whose launches are all answered.
  void Reap();
  // Ends the current epoch. No other one follows.
  void Close(NodeLinks* flush);
  // How many engines it has made.
  std::uint64_t made() const { return last_epoch_; }

 private:
  absl::Status CheckRate(const NodeLinks& links, const JobIdentity& job) const;
  absl::Status CheckNodeOf(const EngineEpoch& epoch, const NodeLink* link,
                           absl::string_view what) const;

  const std::string job_id_;
  const NodeGroupEnvironment* const environment_;
  std::shared_ptr<EngineEpoch> current_;
  // Epochs that have ended, until every launch of theirs is answered.
  std::vector<std::shared_ptr<EngineEpoch>> retired_;
  bool closed_ = false;
  std::uint64_t said_ns_ = 0;  // when it last logged that the nodes must wait; 0: never
  std::uint64_t last_epoch_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_EPOCH_TABLE_H_
