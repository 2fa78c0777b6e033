// Another node's daemon, which the test plays, with a job that is coordinated here. The stream
// never begins, so gRPC is not called. Its messages stay in its queue.

#include "daemon/peer/agent_session.h"

#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/logging.h"
#include "daemon/job/job.h"
#include "daemon/peer/address_memory.h"
#include "daemon/peer/peer_turns.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/job/manual_executor.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/temporary_directory.h"
#include "tests/peer/coordinating_node.h"

namespace gradsync::daemon {
namespace {

using ::testing::ContainsRegex;
using ::testing::Not;

constexpr uid_t kUser = 1000;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class AgentSessionTest : public testing::Test {
 protected:
  AgentSessionTest() {
    agent_ = std::make_shared<AgentSession>(node_.context, nullptr);
    agent_->OnAccepted();
  }
  ~AgentSessionTest() override {
    if (agent_ != nullptr) agent_->OnEnd(absl::OkStatus());
    node_.jobs.Tick();
  }

  // The agent answers a ping, so many seconds later.
  void PongAfter(std::uint64_t seconds) {
    clock_.Advance(seconds * 1'000'000'000);
    node_.jobs.Tick();
    node_.node_groups.Tick();
    v1::AttachRequest message;
    message.mutable_pong()->set_number(1);
    agent_->OnMessage(message);
  }
  std::size_t LiveJobs() const {
    std::size_t live = 0;
    for (const auto& job : node_.jobs.Jobs()) live += job->Empty() ? 0 : 1;
    return live;
  }

  ManualClock clock_;
  ArenaQuota memory_{4 * kMiB, "quota_control_bytes_per_user", "the daemon's own memory"};
  ManualExecutor executor_;
  CoordinatingNode node_{&clock_, &executor_, &executor_, &memory_};
  std::shared_ptr<AgentSession> agent_;
};

TEST_F(AgentSessionTest, UnreadMessagesAreChargedToTheJobsUser) {
  agent_->OnMessage(HelloOf(kUser));
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

// On the wire a launch has 1 byte for each session, and an empty bucket has 2.
TEST_F(AgentSessionTest, UnreadMessagesAreChargedAsTheyAreInMemory) {
  agent_->OnMessage(HelloOf(kUser));
  v1::AttachResponse launch;
  for (int rank = 0; rank < 100'000; ++rank) launch.mutable_launch()->add_incarnations(1);
  agent_->Queue(launch);
  const std::uint64_t charged = memory_.bytes_of(Tenant(kUser));
  EXPECT_GE(charged, 100'000 * sizeof(std::uint64_t));
  v1::AttachResponse answer;
  auto* const assigned =
      answer.mutable_rank_response()->mutable_response()->mutable_layout_assigned();
  for (int bucket = 0; bucket < 10'000; ++bucket) assigned->add_buckets();
  agent_->Queue(answer);
  EXPECT_GE(memory_.bytes_of(Tenant(kUser)), charged + 10'000 * sizeof(v1::Bucket));
}

// A large job's record of a step has a time for each rank and bucket. Every rank gets it.
TEST_F(AgentSessionTest, ARecordThatTheJobKeepsIsChargedOnlyIfItWaitsBehindAnother) {
  constexpr std::size_t kBuckets = 100, kRanks = 1000;
  const auto make_record = [] {
    auto record = std::make_shared<StepRecord>();
    record->times.buckets.resize(kBuckets);
    for (auto& bucket : record->times.buckets) bucket.ready_ns.resize(kRanks);
    return record;
  };
  agent_->OnMessage(HelloOf(kUser));
  const std::shared_ptr<const StepRecord> record = make_record();
  for (std::uint64_t rank = 0; rank < 500; ++rank) {
    agent_->QueueFor(rank, StepDoneMessage{1, record});
  }
  EXPECT_EQ(memory_.total_bytes(), 0u);
  for (int step = 0; step < 3; ++step) agent_->QueueFor(1, StepDoneMessage{1, make_record()});
  EXPECT_GT(memory_.bytes_of(Tenant(kUser)), 3 * kBuckets * kRanks * sizeof(std::uint64_t));
}

TEST_F(AgentSessionTest, AnAgentSaysWhatItsEnginesMayHave) {
  const auto limits = [this](std::uint32_t lanes, std::uint64_t chunk_bytes) {
    const auto agent = std::make_shared<AgentSession>(node_.context, nullptr);
    agent->OnAccepted();
    v1::AttachRequest hello = HelloOf(kUser);
    hello.mutable_hello()->set_engine_lanes(lanes);
    hello.mutable_hello()->set_engine_chunk_bytes(chunk_bytes);
    agent->OnMessage(hello);
    EXPECT_TRUE(agent->greeted());
    const EngineLimits said = agent->engine_limits();
    agent->OnEnd(absl::OkStatus());
    return std::pair<int, std::uint64_t>(said.lanes, said.chunk_bytes);
  };
  EXPECT_EQ(limits(3, 64 << 10), std::pair(3, std::uint64_t{64} << 10));
  EXPECT_EQ(limits(0, 0),
            std::pair(EngineSettings::kMaxLanes, std::uint64_t{EngineSettings::kMaxChunkBytes}))
      << "it sets no limit";
  // Engines can be made within what it says, whatever that is.
  EXPECT_EQ(limits(UINT32_MAX, UINT64_MAX), limits(0, 0));
  EXPECT_EQ(limits(1, 1), std::pair(1, std::uint64_t{EngineSettings::kMinChunkBytes}));
  EXPECT_EQ(limits(1, 65537), std::pair(1, std::uint64_t{65536}));
}

// All strangers would wait for what it sends then.
TEST_F(AgentSessionTest, NobodyHasTheUserIdOfStrangers) {
  agent_->OnMessage(HelloOf(kStrangers.uid));
  EXPECT_FALSE(agent_->greeted());
}

// It may be a stranger's, and others may need the place.
TEST_F(AgentSessionTest, AnAgentWithoutARankEndsAfterAMinute) {
  agent_->OnMessage(HelloOf(kUser));
  PongAfter(61);
  agent_->OnMessage(OpenOf(0, 1));
  EXPECT_EQ(LiveJobs(), 0u) << "it has ended";
}

// It answers no ping, but is not silent.
TEST_F(AgentSessionTest, MessagesThatAreIgnoredKeepNoAgent) {
  agent_->OnMessage(HelloOf(kUser));
  v1::AttachRequest ended;
  ended.mutable_rank_ended()->set_incarnation(7);
  for (int seconds = 0; seconds <= 60; ++seconds) {
    clock_.Advance(1'000'000'000);
    agent_->Tick(clock_.NowNs());
    agent_->OnMessage(ended);
  }
  agent_->OnMessage(OpenOf(0, 1));
  EXPECT_EQ(LiveJobs(), 0u) << "it has ended";
}

TEST_F(AgentSessionTest, AnAgentWhoseRanksHaveEndedEndsAfterAMinute) {
  agent_->OnMessage(HelloOf(kUser));
  PongAfter(59);
  agent_->OnMessage(OpenOf(0, 1));
  EXPECT_EQ(LiveJobs(), 1u);
  v1::AttachRequest ended;
  ended.mutable_rank_ended()->set_incarnation(1);
  agent_->OnMessage(ended);
  PongAfter(1);
  EXPECT_EQ(LiveJobs(), 0u);
  PongAfter(50);
  agent_->OnMessage(OpenOf(0, 2));
  EXPECT_EQ(LiveJobs(), 1u) << "it may come back";
  ended.mutable_rank_ended()->set_incarnation(2);
  agent_->OnMessage(ended);
  PongAfter(1);
  PongAfter(120);
  agent_->OnMessage(OpenOf(0, 3));
  EXPECT_EQ(LiveJobs(), 0u) << "it has ended";
}

TEST_F(AgentSessionTest, AnAgentStaysWhileItsRanksWaitForOthers) {
  agent_->OnMessage(HelloOf(kUser));
  agent_->OnMessage(OpenOf(0, 1));
  for (int hours = 0; hours < 3; ++hours) PongAfter(3600);
  agent_->OnMessage(OpenOf(1, 2));
  ASSERT_EQ(LiveJobs(), 1u);
  EXPECT_EQ(node_.jobs.Jobs().front()->StateOf(1), RankState::kLive);
}

// An agent may name any user.
TEST_F(AgentSessionTest, LinesOfTheLogCountForTheAddressWhateverUserAnAgentNames) {
  const TemporaryDirectory folder;
  LogOptions log;
  log.file = folder.File("log");
  log.clock = &clock_;
  ASSERT_TRUE(InitLogging(log).ok());
  for (uid_t user = 1; user <= 2 * kLimitedLinesPerSecond; ++user) {
    const auto agent = std::make_shared<AgentSession>(node_.context, nullptr);
    agent->OnAccepted();
    agent->OnMessage(HelloOf(user));
    agent->OnMessage(v1::AttachRequest());  // of no kind
    agent->OnEnd(absl::OkStatus());
  }
  LogLimited(LogLevel::kWarning, "node refused", {{"uid", kUser}});
  FlushLogging();
  ASSERT_TRUE(InitLogging(LogOptions()).ok());
  std::ostringstream lines;
  lines << std::ifstream(log.file).rdbuf();
  EXPECT_THAT(lines.str(), ContainsRegex("node refused [^\n]*uid=1 "));
  EXPECT_THAT(lines.str(), Not(ContainsRegex("node refused [^\n]*uid=20 ")));
  EXPECT_THAT(lines.str(), ContainsRegex("node refused uid=1000"));
}

// The user whom the agent names is charged, but the agent may name anyone.
TEST_F(AgentSessionTest, TheMemoryOfAnAddressHasABound) {
  AddressMemory addresses(Job::BytesFor(2000) / AddressMemory::kQuotas);
  node_.context.addresses = &addresses;
  agent_->OnMessage(HelloOf(kUser));
  agent_->OnMessage(OpenOf(0, 1, /*world_size=*/4000));
  EXPECT_EQ(LiveJobs(), 0u);
  agent_->OnMessage(OpenOf(0, 2, /*world_size=*/1000));
  EXPECT_EQ(LiveJobs(), 1u) << "a smaller one has room";
  EXPECT_EQ(addresses.BytesOf(agent_->address()), Job::BytesFor(1000));
  agent_->OnMessage(OpenOf(1, 3, /*world_size=*/1000));
  EXPECT_EQ(addresses.BytesOf(agent_->address()), Job::BytesFor(1000)) << "it counts once";
  const std::string address = agent_->address();
  agent_->OnEnd(absl::OkStatus());
  agent_ = nullptr;
  node_.jobs.Tick();
  EXPECT_EQ(node_.jobs.Jobs().size(), 1u) << "it is kept for status";
  EXPECT_EQ(addresses.BytesOf(address), 0u) << "but counts for its user alone";
  EXPECT_GT(memory_.bytes_of(Tenant(kUser)), 0u);
}

}  // namespace
}  // namespace gradsync::daemon
