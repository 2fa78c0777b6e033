// A node that coordinates a job, and what another node's daemon sends it first.

#ifndef TESTS_PEER_COORDINATING_NODE_H_
#define TESTS_PEER_COORDINATING_NODE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "daemon/arena/arena_quota.h"
#include "daemon/base/clock.h"
#include "daemon/base/user_executor.h"
#include "daemon/job/job_table.h"
#include "daemon/peer/agent_session.h"
#include "daemon/peer/node_group_table.h"
#include "daemon/peer/peer_protocol.h"
#include "gradsync/v1/peer.pb.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/job/held_reducer.h"

namespace gradsync::daemon {

// Node alpha, without its streams. The objects that the test sets outlive it. As thread-safe as its
// members.
struct CoordinatingNode {
  static constexpr std::uint64_t kStagingBytes = 4096;

  // The test sets these.
  const Clock* clock;
  UserExecutor* copier;
  UserExecutor* launcher;        // of the node groups
  ArenaQuota* memory = nullptr;  // null: nothing is charged

  HeldReducer reducer{clock};
  JobTable jobs{Jobs(), 4};
  NodeGroupTable node_groups{Groups()};
  AgentSessionContext context = Agents();

 private:
  JobEnvironment Jobs() {
    JobEnvironment environment;
    environment.clock = clock;
    environment.reducer = &reducer;
    environment.executor = copier;
    environment.node_name = "alpha";
    environment.memory = memory;
    return environment;
  }
  NodeGroupEnvironment Groups() const {
    NodeGroupEnvironment environment;
    environment.node_name = "alpha";
    environment.executor = launcher;
    environment.clock = clock;
    return environment;
  }
  AgentSessionContext Agents() {
    AgentSessionContext agents;
    agents.instance = std::string(kInstanceBytes, 'a');
    agents.node_name = "alpha";
    agents.limits.staging_bytes = kStagingBytes;
    agents.clock = clock;
    agents.jobs = &jobs;
    agents.memory = memory;
    agents.tls = true;  // otherwise the kernel is asked who calls
    agents.find_node_group = [this](const JobKey& key) { return node_groups.Find(key); };
    return agents;
  }
};

// Node beta greets, for this user's job.
inline v1::AttachRequest HelloOf(uid_t user) {
  v1::AttachRequest message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_protocol(kPeerProtocol);
  hello.set_instance(std::string(kInstanceBytes, 'b'));
  hello.set_node_name("beta");
  hello.set_uid(user);
  hello.set_job_id("job");
  hello.set_staging_bytes(CoordinatingNode::kStagingBytes);
  return message;
}

// A rank of node beta joins the job.
inline v1::AttachRequest OpenOf(std::uint32_t rank, std::uint64_t incarnation,
                                std::uint32_t world_size = 3) {
  v1::AttachRequest message;
  message.mutable_rank_request()->set_rank(rank);
  message.mutable_rank_request()->set_incarnation(incarnation);
  v1::OpenSession& open =
      *message.mutable_rank_request()->mutable_request()->mutable_open_session();
  open.mutable_protocol()->set_oldest(kProtocolOldest);
  open.mutable_protocol()->set_newest(kProtocolNewest);
  open.set_shared_memory_abi(kSharedMemoryAbi);
  open.set_job_id("job");
  open.set_rank(rank);
  open.set_world_size(world_size);
  return message;
}

}  // namespace gradsync::daemon

#endif  // TESTS_PEER_COORDINATING_NODE_H_
