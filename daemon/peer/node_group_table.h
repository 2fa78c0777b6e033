// The node groups of the jobs that are coordinated here, by job key.

#ifndef DAEMON_PEER_NODE_GROUP_TABLE_H_
#define DAEMON_PEER_NODE_GROUP_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/job/job.h"
#include "daemon/peer/node_group.h"
#include "daemon/rpc/node_status_source.h"

namespace gradsync::daemon {

// A job with another token is another job: it has its own group, which waits for its own rank 0.
//
// Thread-safe. Calls jobs and node groups without its lock, except NodeGroup::Idle(). Shares the
// groups with the agents' sessions and with the jobs.
class NodeGroupTable {
 public:
  // The objects of `environment` outlive the table.
  explicit NodeGroupTable(NodeGroupEnvironment environment);

  // Finds the group of this key, or makes it. UNAVAILABLE DRAINING: after Refuse().
  absl::StatusOr<std::shared_ptr<NodeGroup>> Find(const JobKey& key);
  // From now on Find() fails.
  void Refuse();

  // Drops the groups that have no job and that no agent uses. Returns whether any is left.
  bool DropUnused();
  // Ticks the groups.
  void Tick();

  // Ends every group's engine.
  void Shutdown();
  // Drops every group.
  void Clear();

  // For status.
  JobNodes NodesOf(const Job& job);
  // How many engines the groups have made.
  std::uint64_t engines_made();

 private:
  std::vector<std::shared_ptr<NodeGroup>> All();

  const NodeGroupEnvironment environment_;

  Mutex mutex_;
  std::map<JobKey, std::shared_ptr<NodeGroup>> node_groups_ ABSL_GUARDED_BY(mutex_);
  bool refusing_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_GROUP_TABLE_H_
