#include "daemon/peer/agent_engine.h"

#include <unistd.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "daemon/engine/engine_settings.h"
#include "daemon/peer/peer_protocol.h"
#include "gtest/gtest.h"
#include "tests/engine/event.h"
#include "tests/kit/limit_threads.h"

namespace gradsync::daemon {
namespace {

constexpr Tenant kUser(1000);
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr int kLanes = 2;
constexpr std::size_t kChunkBytes = 1 << 20;

// An agent whose engine does not connect before the test ends.
class AgentEngineTest : public testing::Test {
 protected:
  AgentEngineTest() {
    AgentEngine::Context context;
    context.user = kUser;
    context.memory = &memory_;
    context.node_name = "beta";
    context.address = "127.0.0.1";
    context.staging_bytes = 4096;
    context.limits = {kLanes, kChunkBytes};
    context.make_engine = [this](const EngineSpec&) -> absl::StatusOr<std::unique_ptr<Engine>> {
      EXPECT_TRUE(release_.Wait().has_value());
      return absl::UnavailableError("no other node is there");
    };
    context.reaper = reaper_.get();
    context.send = [this](v1::AttachRequest message) {
      const std::lock_guard<std::mutex> lock(mutex_);
      sent_.push_back(std::move(message));
      if (sent_.back().launch_done().sequence() == 0) engine_failed_.Set();
    };
    context.find_rank = [](std::uint64_t) -> std::shared_ptr<ForwardingJob> { return nullptr; };
    context.settled = [this] { ++settled_; };
    engine_ = std::make_shared<AgentEngine>(std::move(context));
  }
  ~AgentEngineTest() override {
    release_.Set();
    engine_->End(absl::CancelledError("the test has ended"));
    reaper_.reset();
  }

  static v1::ConnectEngine ConnectMessage(std::uint64_t epoch, std::uint32_t lanes = kLanes,
                                          std::uint64_t chunk_bytes = kChunkBytes) {
    v1::ConnectEngine connect;
    connect.set_epoch(epoch);
    connect.set_node(1);
    connect.add_node_names("alpha");
    connect.add_node_names("beta");
    connect.set_lanes(lanes);
    connect.set_chunk_bytes(chunk_bytes);
    return connect;
  }
  void Connect(std::uint64_t epoch, std::uint32_t lanes = kLanes,
               std::uint64_t chunk_bytes = kChunkBytes) {
    engine_->Connect(ConnectMessage(epoch, lanes, chunk_bytes));
  }
  // Expects that the agent makes no engine of the message, and says why.
  void ExpectNoEngine(const v1::ConnectEngine& connect, const std::string& text) {
    const std::uint64_t made = engine_->engines_made();
    engine_->Connect(connect);
    EXPECT_EQ(engine_->engines_made(), made) << text;
    EXPECT_FALSE(engine_->Snapshot().has_value()) << text;
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSERT_FALSE(sent_.empty()) << text;
    const v1::LaunchDone& done = sent_.back().launch_done();
    EXPECT_EQ(done.epoch(), connect.epoch());
    EXPECT_EQ(done.sequence(), 0u);
    EXPECT_NE(done.status().message().find(text), std::string::npos) << done.ShortDebugString();
  }
  // Expects that the engine of this epoch was the last that has failed, with this text.
  void ExpectEngineRefused(std::uint64_t epoch, const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSERT_EQ(sent_.size(), 1u);
    const v1::LaunchDone& done = sent_.back().launch_done();
    EXPECT_EQ(done.epoch(), epoch);
    EXPECT_EQ(done.sequence(), 0u);
    EXPECT_EQ(done.status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
    EXPECT_NE(done.status().message().find(text), std::string::npos) << done.ShortDebugString();
    sent_.clear();
  }
  static v1::Launch Launch(std::uint64_t epoch, std::uint64_t sequence) {
    v1::Launch launch;
    launch.set_epoch(epoch);
    launch.set_sequence(sequence);
    launch.set_dtype(v1::DATA_TYPE_FLOAT32);
    launch.set_count(100);
    launch.set_scale(1.0);
    launch.set_op(v1::REDUCE_OP_SUM);
    return launch;
  }
  // Expects that the launch is answered at once, with an error that contains this text.
  void ExpectRefused(const v1::Launch& launch, const std::string& text) {
    const int settled = settled_;
    engine_->Launch(launch);
    EXPECT_EQ(settled_, settled + 1);
    EXPECT_FALSE(engine_->busy());
    const std::lock_guard<std::mutex> lock(mutex_);
    ASSERT_FALSE(sent_.empty());
    const v1::LaunchDone& done = sent_.back().launch_done();
    EXPECT_EQ(done.epoch(), launch.epoch());
    EXPECT_EQ(done.sequence(), launch.sequence());
    EXPECT_NE(done.status().message().find(text), std::string::npos) << done.ShortDebugString();
  }

  // Launches until one is refused. Returns its answer, and how many were taken before.
  std::pair<v1::LaunchDone, int> LaunchUntilRefused(v1::Launch launch, int most) {
    for (int taken = 0; taken < most; ++taken) {
      launch.set_sequence(static_cast<std::uint64_t>(taken) + 1);
      engine_->Launch(launch);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!sent_.empty()) return {sent_.back().launch_done(), taken};
    }
    return {{}, most};
  }

  ArenaQuota memory_{kMiB, "quota_control_bytes_per_user", "the daemon's own memory"};
  Event release_;
  Event engine_failed_;
  std::unique_ptr<ConcurrentExecutor> reaper_ = std::make_unique<ConcurrentExecutor>(8);
  std::shared_ptr<AgentEngine> engine_;
  std::mutex mutex_;
  std::vector<v1::AttachRequest> sent_;
  int settled_ = 0;
};

TEST_F(AgentEngineTest, LaunchWithoutItsEngineIsRefused) {
  ExpectRefused(Launch(1, 1), "an engine that is not here");
  Connect(2);
  ExpectRefused(Launch(1, 1), "an engine that is not here");
}

TEST_F(AgentEngineTest, MalformedLaunchesAreRefused) {
  Connect(1);
  ExpectRefused(Launch(1, 2), "out of order");
  v1::Launch launch = Launch(1, 2);
  launch.add_incarnations(5);
  ExpectRefused(launch, "a rank that is not here");
  launch = Launch(1, 3);
  launch.set_dtype(v1::DATA_TYPE_UNSPECIFIED);
  ExpectRefused(launch, "unknown type");
  launch = Launch(1, 4);
  launch.set_root_node(2);
  ExpectRefused(launch, "too many");
  launch = Launch(1, 5);
  launch.set_root_node(0);
  launch.set_count(4097);
  ExpectRefused(launch, "too many");
  std::uint64_t sequence = 5;
  for (const auto op : {v1::REDUCE_OP_UNSPECIFIED, v1::REDUCE_OP_AVERAGE}) {
    launch = Launch(1, ++sequence);
    launch.set_op(op);
    ExpectRefused(launch, "an unknown operation");
  }
}

TEST_F(AgentEngineTest, ALaunchNamesEachRankOnce) {
  Connect(1);
  v1::Launch launch = Launch(1, 1);
  for (const std::uint64_t incarnation : {5, 6, 5}) launch.add_incarnations(incarnation);
  ExpectRefused(launch, "a rank twice");
  launch = Launch(1, 2);
  for (std::uint64_t i = 0; i <= kMaxRanksPerNode; ++i) launch.add_incarnations(i);
  ExpectRefused(launch, "1025 ranks of one node; 1024 allowed");
}

TEST_F(AgentEngineTest, ManyLaunchesInFlightAreTheUsersMemory) {
  Connect(1);
  v1::Launch launch = Launch(1, 1);
  for (std::uint64_t i = 1; i <= 100; ++i) {
    launch.set_sequence(i);
    engine_->Launch(launch);
  }
  EXPECT_TRUE(engine_->busy());
  EXPECT_EQ(memory_.total_bytes(), 0u) << "those of a step cost nothing";
  launch.set_epoch(2);
  Connect(2);  // answers those of the first engine
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_EQ(sent_.size(), 100u);
    sent_.clear();
  }
  const auto [refused, taken] = LaunchUntilRefused(launch, 10'000);
  EXPECT_EQ(refused.status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_NE(refused.status().message().find("node beta has no memory for the coordinator's "
                                            "launches in flight: user 1000"),
            std::string::npos)
      << refused.ShortDebugString();
  EXPECT_GT(taken, 500);
  EXPECT_GT(memory_.bytes_of(kUser), kMiB / 2);
  // The exchange keeps what they took until its end.
  release_.Set();
  engine_->End(absl::CancelledError("the test has ended"));
  reaper_.reset();
  EXPECT_EQ(memory_.total_bytes(), 0u);
}

// The exchange allocates as much as passes through.
TEST_F(AgentEngineTest, ABroadcastToANodeWithoutRanksIsTheUsersMemory) {
  Connect(1);
  v1::Launch launch = Launch(1, 1);
  launch.set_root_node(0);
  launch.set_count(4096);
  const auto [refused, taken] = LaunchUntilRefused(launch, 10'000);
  EXPECT_EQ(refused.status().code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_LE(static_cast<std::uint64_t>(taken), kMiB / 4096);
  EXPECT_GT(memory_.bytes_of(kUser), kMiB / 2);
  v1::EngineEnd end;
  end.set_epoch(1);
  engine_->Take(end);
  EXPECT_FALSE(engine_->busy());
}

TEST_F(AgentEngineTest, EndAnswersLaunchesInFlight) {
  Connect(1);
  engine_->Launch(Launch(1, 1));
  EXPECT_TRUE(engine_->busy());
  EXPECT_EQ(settled_, 0);
  v1::EngineEnd other;
  other.set_epoch(7);
  engine_->Take(other);
  EXPECT_TRUE(engine_->busy()) << "the end was that of another epoch";
  v1::EngineEnd end;
  end.set_epoch(1);
  engine_->Take(end);
  EXPECT_FALSE(engine_->busy());
  EXPECT_EQ(settled_, 1);
  EXPECT_FALSE(engine_->Snapshot().has_value());
}

// The agent's copies of such a message stay while the engine exists, and nobody is charged.
TEST_F(AgentEngineTest, AMalformedConnectEngineMakesNoEngine) {
  v1::ConnectEngine connect = ConnectMessage(1);
  connect.clear_node_names();
  ExpectNoEngine(connect, "an engine of 0 nodes; 2 to 256 allowed");
  for (std::uint32_t i = 0; i <= kMaxEngineNodes; ++i) connect.add_node_names("node");
  ExpectNoEngine(connect, "an engine of 257 nodes; 2 to 256 allowed");
  connect = ConnectMessage(2);
  connect.set_node(2);
  ExpectNoEngine(connect, "an engine of 2 nodes to node 2");
  for (const std::string& name : {std::string(), std::string(65, 'x'), std::string("a\nb")}) {
    connect = ConnectMessage(3);
    connect.set_node_names(0, name);
    ExpectNoEngine(connect, "a node's name that is empty, too long or not printable");
  }
  connect = ConnectMessage(4);
  connect.set_address(std::string(256, '1'));
  ExpectNoEngine(connect, "too long an address");
  connect.set_address(std::string(255, '1'));
  connect.set_node_names(0, std::string(64, 'x'));
  engine_->Connect(connect);
  EXPECT_EQ(engine_->engines_made(), 1u);
  connect.set_node(2);
  ExpectNoEngine(connect, "to node 2");
}

// Each has memory, threads and a process until its end, and a coordinator may ask for any number.
TEST_F(AgentEngineTest, EnginesThatHaveNotEndedAreFew) {
  std::uint64_t epoch = 0;
  while (epoch < AgentEngine::kMaxEngines) Connect(++epoch);
  Connect(++epoch);
  EXPECT_EQ(engine_->engines_made(), AgentEngine::kMaxEngines);
  ExpectEngineRefused(epoch, "node beta: the coordinator has connected 4 engines");
}

// Its node pays for each of them with threads and memory.
TEST_F(AgentEngineTest, ACoordinatorGetsNoMoreLanesAndNoLargerChunksThanTheNodesOwnOptionsAllow) {
  Connect(1, kLanes + 1);
  ExpectEngineRefused(
      1, "node beta: the coordinator asks for 3 lanes, and engine_lanes allows 2 here");
  Connect(2, kLanes, 2 * kChunkBytes);
  ExpectEngineRefused(2,
                      "node beta: the coordinator asks for chunks of 2097152 bytes, and "
                      "engine_chunk_bytes allows 1048576 here");
  EXPECT_EQ(engine_->engines_made(), 0u);
  Connect(3, UINT32_MAX, UINT64_MAX);
  ExpectEngineRefused(3, "engine_lanes allows 2 here");
  Connect(4);
  EXPECT_EQ(engine_->engines_made(), 1u);
}

TEST_F(AgentEngineTest, FailureToConnectIsReportedAsLaunchZero) {
  Connect(1);
  release_.Set();
  ASSERT_TRUE(engine_failed_.Wait().has_value());
  const std::lock_guard<std::mutex> lock(mutex_);
  EXPECT_EQ(sent_.back().launch_done().epoch(), 1u);
  EXPECT_EQ(sent_.back().launch_done().status().message(), "no other node is there");
}

// The coordinator tells every node what the first answer says that is not OK. It may be the answer
// to a launch.
TEST_F(AgentEngineTest, WithoutAThreadEveryAnswerNamesTheNode) {
  const auto connect_and_launch = [this] {
    LimitThreads(0, /*user=*/34569);
    Connect(1);
    engine_->Launch(Launch(1, 1));
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const v1::AttachRequest& answer : sent_) {
      std::cerr << answer.launch_done().sequence() << ": "
                << answer.launch_done().status().message() << "; ";
    }
    _exit(0);
  };
  EXPECT_EXIT(connect_and_launch(), testing::ExitedWithCode(0),
              "0: node beta: no thread could be started.*; "
              "1: node beta: no thread could be started.*; ");
}

}  // namespace
}  // namespace gradsync::daemon
