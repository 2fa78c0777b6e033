// Another node's daemon, which the test plays, with a job that is coordinated here. The stream
// never begins, so gRPC is not called. What it would send stays in its queue.

#include "daemon/peer/agent_session.h"

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/peer/node_group_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/kit/manual_clock.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kUser = 1000;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kStagingBytes = 4096;

class AgentSessionTest : public testing::Test {
 protected:
  AgentSessionTest() {
    context_.instance = std::string(kInstanceBytes, 'a');
    context_.node_name = "alpha";
    context_.limits.staging_bytes = kStagingBytes;
    context_.clock = &clock_;
    context_.jobs = &jobs_;
    context_.memory = &memory_;
    context_.tls = true;  // otherwise the kernel is asked who calls
    context_.find_node_group = [this](const JobKey& key) { return node_groups_.Find(key); };
    agent_ = std::make_shared<AgentSession>(context_, nullptr);
    agent_->OnAccepted();
  }
  ~AgentSessionTest() override {
    if (agent_ != nullptr) agent_->OnEnd(absl::OkStatus());
    jobs_.Tick();
  }

  JobEnvironment Jobs() {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    environment.node_name = "alpha";
    environment.memory = &memory_;
    return environment;
  }
  NodeGroupEnvironment Groups() {
    NodeGroupEnvironment environment;
    environment.node_name = "alpha";
    environment.clock = &clock_;
    return environment;
  }
  static v1::AttachRequest Hello() {
    v1::AttachRequest message;
    v1::Hello& hello = *message.mutable_hello();
    hello.set_protocol(kPeerProtocol);
    hello.set_instance(std::string(kInstanceBytes, 'b'));
    hello.set_node_name("beta");
    hello.set_uid(kUser);
    hello.set_job_id("job");
    hello.set_staging_bytes(kStagingBytes);
    return message;
  }

  ManualClock clock_;
  ManualExecutor executor_;
  HeldReducer reducer_{&clock_};
  ArenaQuota memory_{4 * kMiB, "quota_control_bytes_per_user", "the daemon's own memory"};
  JobTable jobs_{Jobs(), 4};
  NodeGroupTable node_groups_{Groups()};
  AgentSessionContext context_;
  std::shared_ptr<AgentSession> agent_;
};

TEST_F(AgentSessionTest, WhatAnAgentLeavesUnreadIsChargedToTheJobsUser) {
  agent_->OnMessage(Hello());
  ASSERT_TRUE(agent_->greeted());
  v1::AttachResponse message;
  message.mutable_worker_call()->set_call(std::string(50'000, 'x'));
  agent_->Queue(message);
  EXPECT_EQ(memory_.total_bytes(), 0u) << "a little costs nothing";
  for (int i = 0; i < 100; ++i) agent_->Queue(message);
  EXPECT_GT(memory_.bytes_of(Tenant(kUser)), 3 * kMiB);
  agent_->OnEnd(absl::OkStatus());
  agent_ = nullptr;
  EXPECT_EQ(memory_.total_bytes(), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
