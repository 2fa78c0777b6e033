#include "daemon/peer/node_group_table.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

NodeGroupTable::NodeGroupTable(NodeGroupEnvironment environment)
    : environment_(std::move(environment)) {}

absl::StatusOr<std::shared_ptr<NodeGroup>> NodeGroupTable::Find(const JobKey& key) {
  MutexLock lock(&mutex_);
  if (refusing_) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDraining,
                     absl::StrCat("the daemon of node ", environment_.node_name, " is stopping"));
  }
  auto& node_group = node_groups_[key];
  if (node_group == nullptr) node_group = std::make_shared<NodeGroup>(key, environment_);
  return node_group;
}

void NodeGroupTable::Refuse() {
  MutexLock lock(&mutex_);
  refusing_ = true;
}

bool NodeGroupTable::DropUnused() {
  std::vector<std::shared_ptr<NodeGroup>> unused;
  bool any = false;
  {
    MutexLock lock(&mutex_);
    for (auto it = node_groups_.begin(); it != node_groups_.end();) {
      if (it->second.use_count() == 1 && it->second->Idle()) {
        unused.push_back(std::move(it->second));
        it = node_groups_.erase(it);
      } else {
        ++it;
      }
    }
    any = !node_groups_.empty();
  }
  for (const auto& node_group : unused) node_group->Shutdown();
  return any;
}

void NodeGroupTable::Tick() {
  for (const auto& node_group : All()) node_group->Tick();
}

void NodeGroupTable::Shutdown() {
  for (const auto& node_group : All()) node_group->Shutdown();
}

void NodeGroupTable::Clear() {
  MutexLock lock(&mutex_);
  node_groups_.clear();
}

JobNodes NodeGroupTable::NodesOf(const Job& job) {
  const JobIdentity& identity = job.identity();
  std::shared_ptr<NodeGroup> node_group;
  {
    MutexLock lock(&mutex_);
    const auto found =
        node_groups_.find(JobKey{identity.uid, identity.job_id, identity.token_hash});
    if (found != node_groups_.end()) node_group = found->second;
  }
  return node_group == nullptr ? JobNodes{} : node_group->NodesOf(job);
}

std::uint64_t NodeGroupTable::engines_made() {
  std::uint64_t made = 0;
  for (const auto& node_group : All()) made += node_group->engines_made();
  return made;
}

std::vector<std::shared_ptr<NodeGroup>> NodeGroupTable::All() {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<NodeGroup>> node_groups;
  for (const auto& [key, node_group] : node_groups_) node_groups.push_back(node_group);
  return node_groups;
}

}  // namespace gradsync::daemon
