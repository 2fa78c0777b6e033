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
#include "daemon/job/job_table.h"
#include "daemon/peer/node_group.h"
#include "daemon/rpc/node_status_source.h"

namespace gradsync::daemon {

// If ranks of one job come with two tokens, there are two groups until rank 0 joins: rank 0's token
// is the right one.
//
// Thread-safe. Calls jobs and node groups without its lock, except NodeGroup::Idle(). Shares the
// groups with the agents' sessions and with the jobs.
class NodeGroupTable {
 public:
  // `jobs` and what `environment` points to outlive the table.
  NodeGroupTable(NodeGroupEnvironment environment, JobTable* jobs);

  // Finds the group of this key, or makes it. PERMISSION_DENIED CREDENTIALS: rank 0
  // of the job is here with another token. UNAVAILABLE DRAINING: after Refuse().
  absl::StatusOr<std::shared_ptr<NodeGroup>> Find(const JobKey& key);
  // From now on Find() fails.
  void Refuse();

  // Drops the groups that have no job and that no agent uses. Returns whether any is left.
  bool DropUnused();
  // Ticks the groups. Ends a group's jobs if their rank 0 has come with another token.
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
  // CREDENTIALS if the job's rank 0 has joined on this node with another token, and no rank 0 with
  // this one. Other ranks do not count: rank 0's token is the right one.
  absl::Status CheckToken(const JobKey& key) const;
  // Ends jobs whose ranks joined from other nodes before rank 0, with another token than rank 0's.
  void CheckTokens(NodeGroup* node_group) const;
  std::vector<std::shared_ptr<NodeGroup>> All();

  const NodeGroupEnvironment environment_;
  JobTable* const jobs_;

  Mutex mutex_;
  std::map<JobKey, std::shared_ptr<NodeGroup>> node_groups_ ABSL_GUARDED_BY(mutex_);
  bool refusing_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_PEER_NODE_GROUP_TABLE_H_
