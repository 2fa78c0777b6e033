// NodeGroup with links that only record, and engines that a test completes, fails and delays.

#include "daemon/peer/node_group.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "daemon/arena/arena_quota.h"
#include "daemon/base/error.h"
#include "daemon/peer/address_memory.h"
#include "daemon/peer/counted_ranks.h"
#include "daemon/peer/engine_epoch.h"
#include "gtest/gtest.h"
#include "tests/engine/event.h"
#include "tests/job/job_fixture.h"
#include "tests/job/manual_executor.h"
#include "tests/kit/gate.h"
#include "tests/kit/soon.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync::daemon {
namespace {

class RecordingLink final : public NodeLink {
 public:
  explicit RecordingLink(std::string name, const EngineLimits& limits = {})
      : name_(std::move(name)), limits_(limits) {}
  void Queue(v1::AttachResponse message) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    messages_.push_back(std::move(message));
  }
  void Flush() override {
    std::function<void()> on_flush;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++flushes_;
      on_flush.swap(on_flush_);
    }
    if (on_flush) on_flush();
  }
  void Close(const absl::Status& status) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(closed_);
    closed_ = true;
    close_status_ = status;
  }
  const std::string& node_name() const override { return name_; }
  const std::string& address() const override { return address_; }
  const std::string& network() const override { return address_; }
  const EngineLimits& engine_limits() const override { return limits_; }
  std::uint64_t heard_ns() const override { return 1; }

  // Why it was closed; OK if it was not.
  absl::Status close_status() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return close_status_;
  }
  // The messages of this kind that were sent so far.
  std::vector<v1::AttachResponse> Of(v1::AttachResponse::KindCase kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<v1::AttachResponse> found;
    for (const auto& message : messages_) {
      if (message.kind_case() == kind) found.push_back(message);
    }
    return found;
  }
  bool Closed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }
  int flushes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return flushes_;
  }
  // Calls this once, within the next Flush().
  void OnFlush(std::function<void()> call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    on_flush_ = std::move(call);
  }

 private:
  const std::string name_;
  const EngineLimits limits_;
  const std::string address_ = "127.0.0.1";
  std::mutex mutex_;
  std::vector<v1::AttachResponse> messages_;
  bool closed_ = false;
  absl::Status close_status_;
  int flushes_ = 0;
  std::function<void()> on_flush_;
};

// What a test sees of an engine. It stays valid after the engine has been destroyed.
struct EngineRecord {
  EngineSpec spec;
  Event submitted;
  Event destroyed;
  std::mutex mutex;
  std::vector<Exchange*> held;
  std::function<void(const absl::Status&)> broadcast_done;

  std::vector<Exchange*> Take() {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(held, {});
  }
};

class HeldEngine final : public Engine {
 public:
  explicit HeldEngine(std::shared_ptr<EngineRecord> record) : record_(std::move(record)) {}
  ~HeldEngine() override {
    for (Exchange* exchange : record_->Take()) exchange->done(absl::CancelledError("closed"));
    record_->destroyed.Set();
  }
  void Submit(Exchange* exchange) override {
    {
      const std::lock_guard<std::mutex> lock(record_->mutex);
      record_->held.push_back(exchange);
    }
    record_->submitted.Set();
  }
  void Broadcast(std::vector<std::byte*>, std::size_t, std::uint32_t,
                 std::function<void(const absl::Status&)> done) override {
    {
      const std::lock_guard<std::mutex> lock(record_->mutex);
      record_->broadcast_done = std::move(done);
    }
    record_->submitted.Set();
  }
  void Abort(const absl::Status&) override {}
  EngineStatistics Statistics() const override { return {}; }

 private:
  const std::shared_ptr<EngineRecord> record_;
};

// Thread-safe.
class EngineMakers {
 public:
  EngineMaker Maker() {
    return [this](const EngineSpec& spec) -> absl::StatusOr<std::unique_ptr<Engine>> {
      auto record = std::make_shared<EngineRecord>();
      record->spec = spec;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        records_.push_back(record);
        changed_.notify_all();
      }
      return std::make_unique<HeldEngine>(std::move(record));
    };
  }
  // The engine with this number, counted from 0. Waits until it is being made.
  std::shared_ptr<EngineRecord> Await(std::size_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool made = changed_.wait_for(lock, kPatience, [&] { return records_.size() > number; });
    EXPECT_TRUE(made) << "engine " << number;
    return made ? records_[number] : std::make_shared<EngineRecord>();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<EngineRecord>> records_;
};

const Tenant kPayer(1000);

// Rank 0 is on this node, alpha; rank 1 on beta, rank 2 on gamma.
class NodeGroupTest : public JobFixture {
 protected:
  void SetUp() override {
    Start(3);
    node_group_ = MakeNodeGroup(engines_.Maker(), &rate_);
    node_group_->Tick();
    channel_ = AgreeOn("model");
  }

  void TearDown() override {
    // The streams of these nodes end, since launches in flight wait for the nodes.
    for (const auto& link : {beta_, gamma_}) {
      node_group_->Lost(link.get(), absl::UnavailableError("its stream has ended"));
    }
    node_group_->Shutdown();
    // Launches that the nodes have not answered keep the job alive.
    for (const auto& link : {beta_, gamma_}) {
      node_group_->Lost(link.get(), absl::UnavailableError("its stream has ended"));
    }
    turns_.RunAll();
    reaper_.reset();
  }

  std::shared_ptr<NodeGroup> MakeNodeGroup(EngineMaker maker, MeetingRate* rate = nullptr) {
    NodeGroupEnvironment environment;
    environment.node_name = "alpha";
    environment.address = "127.0.0.1";
    environment.make_engine = std::move(maker);
    environment.reaper = reaper_.get();
    environment.executor = &turns_;
    environment.clock = &clock_;
    environment.rate = rate;
    auto node_group = std::make_shared<NodeGroup>(JobKey{1000, "run-7", ""}, environment);
    node_group->AddRank(job_, 1, beta_, Incarnation(1));
    node_group->AddRank(job_, 2, gamma_, Incarnation(2));
    return node_group;
  }

  // Agrees on a layout. Returns its channel.
  std::uint32_t AgreeOn(const std::string& name, std::size_t buckets = 1) {
    std::uint32_t channel = 0;
    for (const std::uint32_t rank : {0, 1, 2}) channel = Register(rank, Spec(buckets, name));
    EXPECT_TRUE(Map(0, channel).ok());
    for (const std::uint32_t rank : {1, 2}) {
      EXPECT_TRUE(job_->ArenaMapped(Of(rank), channel, RankMemory{}).ok());
    }
    TakeAll();
    return channel;
  }

  void MarkReady(std::uint64_t step) { MarkReady(channel_, step); }
  void MarkReady(std::uint32_t channel, std::uint64_t step) {
    for (const std::uint32_t rank : {0, 1}) {
      ASSERT_TRUE(job_->MarkReady(Of(rank), channel, step, {0}).ok());
    }
  }

  JobEnvironment Environment() {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    return environment;
  }

  // The job again, full with ranks 0 and 1.
  std::shared_ptr<Job> NextGeneration() {
    JobIdentity identity = job_->identity();
    ++identity.generation;
    const auto next = std::make_shared<Job>(identity, 2, options_, Environment());
    for (const std::uint32_t rank : {0, 1}) {
      EXPECT_TRUE(next->Join(rank, 2, options_, Incarnation(10 + rank), sinks_[rank]).ok());
    }
    next_.push_back(next);
    return next;
  }

  // Every rank ends a step of many buckets, with one message each.
  void EndStepOfMany() {
    many_ = AgreeOn("many", kMany);
    for (const std::uint32_t rank : {0, 1, 2}) {
      ASSERT_TRUE(job_->FinishStep(Of(rank), many_, 1, "").ok());
    }
  }
  // How many launches the link has got, all of EndStepOfMany(). They are in order.
  std::size_t LaunchedOfMany(RecordingLink* link) {
    const auto launches = link->Of(v1::AttachResponse::kLaunch);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      EXPECT_EQ(launches[i].launch().channel(), many_);
      EXPECT_EQ(launches[i].launch().bucket(), i);
      EXPECT_EQ(launches[i].launch().sequence(), i + 1);
    }
    return launches.size();
  }

  // All nodes finish the first `launches` launches.
  void FinishFirst(std::size_t launches) {
    const auto engine = engines_.Await(0);
    ASSERT_TRUE(engine->submitted.Wait().has_value());
    for (std::size_t finished = 0; finished < launches;) {
      for (Exchange* exchange : engine->Take()) {
        exchange->done(absl::OkStatus());
        ++finished;
      }
    }
    for (std::size_t sequence = 1; sequence <= launches; ++sequence) {
      for (const auto& link : {beta_, gamma_}) {
        ASSERT_TRUE(LaunchDone(link.get(), 1, sequence).ok());
      }
    }
  }

  // Gamma, whose rank has left, detaches while a bucket is in flight. Then a bucket of `other` is
  // ready.
  std::shared_ptr<EngineRecord> DetachInMidLaunch(std::uint32_t other) {
    EXPECT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
    MarkReady(1);
    auto engine = engines_.Await(0);
    EXPECT_TRUE(engine->submitted.Wait().has_value());
    node_group_->Detach(gamma_);
    MarkReady(other, 1);
    return engine;
  }

  absl::Status LaunchDone(NodeLink* link, std::uint64_t epoch, std::uint64_t sequence) {
    v1::LaunchDone message;
    message.set_epoch(epoch);
    message.set_sequence(sequence);
    return node_group_->LaunchDone(link, message);
  }

  static absl::Status Silence() {
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kEngineTimeout,
                     "node gamma: not a word for 8s", {{field::kNode, "gamma"}});
  }

  std::vector<std::shared_ptr<Job>> next_;
  MeetingRate rate_{/*burst=*/16};
  ManualExecutor turns_;
  std::unique_ptr<ConcurrentExecutor> reaper_ = std::make_unique<ConcurrentExecutor>(8);
  EngineMakers engines_;
  std::shared_ptr<RecordingLink> beta_ = std::make_shared<RecordingLink>("beta");
  std::shared_ptr<RecordingLink> gamma_ = std::make_shared<RecordingLink>("gamma");
  std::shared_ptr<NodeGroup> node_group_;
  std::uint32_t channel_ = 0;
  static constexpr std::size_t kMany = 200;
  std::uint32_t many_ = 0;
};

TEST_F(NodeGroupTest, FailureOfAnIdleEngineEndsTheJobAfterAMoment) {
  engines_.Await(0)->spec.failed(Silence());
  node_group_->Tick();
  EXPECT_FALSE(job_->HasEnded());
  clock_.Advance(500'000'000);
  node_group_->Tick();
  const auto end = Only<SessionEndMessage>(0);
  EXPECT_EQ(ReasonOf(end.status), "ENGINE_TIMEOUT") << end.status;
  EXPECT_EQ(FieldOf(end.status, "node"), "gamma");
  for (const auto& link : {beta_, gamma_}) {
    EXPECT_EQ(link->Of(v1::AttachResponse::kEngineEnd).size(), 1u) << link->node_name();
  }
}

TEST_F(NodeGroupTest, TheNodesOfAUserMeetOnlySoOften) {
  MeetingRate rate(/*burst=*/1);
  ASSERT_TRUE(rate.Take(&kPayer, "10.0.0.9", "10.0.0.9", clock_.NowNs()));
  const auto later = MakeNodeGroup(engines_.Maker(), &rate);
  later->Tick();
  EXPECT_EQ(later->engines_made(), 0u);
  clock_.Advance(KeyedRate<Tenant>::kRegainNs);
  later->Tick();
  EXPECT_EQ(later->engines_made(), 1u);
  later->Tick();
  EXPECT_EQ(later->engines_made(), 1u) << "the nodes have met";
  later->Shutdown();
}

TEST_F(NodeGroupTest, TheNodesOfAnAddressMeetOnlySoOften) {
  MeetingRate rate(/*burst=*/1);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(rate.Take(nullptr, beta_->address(), "a network", clock_.NowNs()));
  }
  const auto later = MakeNodeGroup(engines_.Maker(), &rate);
  later->Tick();
  EXPECT_EQ(later->engines_made(), 0u);
  later->Shutdown();
}

// Another node has begun it, and may name any user.
TEST_F(NodeGroupTest, AJobOfAnotherNodeDoesNotCountForItsUser) {
  MeetingRate rate(/*burst=*/1);
  JobIdentity identity = job_->identity();
  identity.origin = AddressMemory(/*bytes_per_user=*/1 << 20).Of("10.0.0.9", "10.0.0.9");
  job_ = std::make_shared<Job>(identity, 3, options_, Environment());
  for (const std::uint32_t rank : {0, 1, 2}) {
    ASSERT_TRUE(job_->Join(rank, 3, options_, Incarnation(rank), sinks_[rank]).ok());
  }
  const auto theirs = MakeNodeGroup(engines_.Maker(), &rate);
  theirs->Tick();
  EXPECT_EQ(theirs->engines_made(), 1u);
  EXPECT_TRUE(rate.Take(&kPayer, "10.0.0.8", "10.0.0.8", clock_.NowNs()));
  theirs->Shutdown();
}

// Ranks 0 and 1 have joined again, without rank 2, which is still in the old run.
TEST_F(NodeGroupTest, AnEngineStaysWhileItsGenerationIsFull) {
  const auto next = NextGeneration();
  node_group_->AddRank(next, 1, beta_, Incarnation(11));
  for (int tick = 0; tick < 4; ++tick) node_group_->Tick();
  EXPECT_EQ(node_group_->engines_made(), 1u);
}

TEST_F(NodeGroupTest, OfTwoFullGenerationsTheNewestMeetsFirst) {
  const auto both = MakeNodeGroup(engines_.Maker());
  both->AddRank(NextGeneration(), 1, beta_, Incarnation(11));
  for (int tick = 0; tick < 4; ++tick) both->Tick();
  EXPECT_EQ(both->engines_made(), 1u);
  EXPECT_EQ(beta_->Of(v1::AttachResponse::kConnectEngine).size(), 2u) << "one in SetUp()";
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kConnectEngine).size(), 1u) << "in SetUp()";
  both->Shutdown();
}

// It answers pings, so that nothing else would end the job's wait.
TEST_F(NodeGroupTest, ANodeThatDoesNotAnswerALaunchIsDisconnectedByName) {
  MarkReady(1);
  ASSERT_TRUE(job_->MarkReady(Of(2), channel_, 1, {0}).ok());
  ASSERT_TRUE(engines_.Await(0)->submitted.Wait().has_value());
  clock_.Advance(2 * EngineEpoch::kLateNs);
  node_group_->Tick();
  EXPECT_TRUE(gamma_->close_status().ok()) << "nobody has answered yet";
  ASSERT_TRUE(LaunchDone(beta_.get(), 1, 1).ok());
  clock_.Advance(EngineEpoch::kLateNs);
  node_group_->Tick();
  EXPECT_TRUE(gamma_->close_status().ok());
  clock_.Advance(1);
  for (int tick = 0; tick < 2; ++tick) node_group_->Tick();
  EXPECT_TRUE(beta_->close_status().ok());
  const absl::Status why = gamma_->close_status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_EQ(FieldOf(why, "node"), "gamma");
}

TEST_F(NodeGroupTest, ANodeThatStaysSilentAfterAFailureIsDisconnectedByName) {
  MarkReady(1);
  ASSERT_TRUE(job_->MarkReady(Of(2), channel_, 1, {0}).ok());
  const auto engine = engines_.Await(0);
  ASSERT_TRUE(engine->submitted.Wait().has_value());
  engine->spec.failed(Silence());
  clock_.Advance(EngineEpoch::kLateAfterFailureNs + 1);
  for (int tick = 0; tick < 2; ++tick) node_group_->Tick();
  for (const auto& link : {beta_, gamma_}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(link->close_status())) << link->node_name();
  }
}

// A bucket cannot wait: its job would wait for it, and nobody for the job.
TEST_F(NodeGroupTest, AJobWhoseNodesMayNotMeetEndsByNameWithItsNextBucket) {
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  node_group_->Lost(gamma_.get(), absl::UnavailableError("its stream has ended"));
  while (rate_.Take(&kPayer, "10.0.0.9", "10.0.0.9", clock_.NowNs())) {
  }
  EXPECT_FALSE(job_->HasEnded());
  MarkReady(1);
  EXPECT_TRUE(job_->HasEnded());
  const auto end = Only<SessionEndMessage>(0);
  EXPECT_EQ(ReasonOf(end.status), "ENGINE_FAILED") << end.status;
  EXPECT_TRUE(Says(end.status, "too many engines were begun for user 1000")) << end.status;
}

TEST_F(NodeGroupTest, FailureReportedByAnotherNodeEndsTheJobToo) {
  v1::LaunchDone failed;
  failed.set_epoch(1);
  failed.mutable_status()->set_code(static_cast<int>(absl::StatusCode::kUnavailable));
  failed.mutable_status()->set_message("nothing comes from gamma");
  ASSERT_TRUE(node_group_->LaunchDone(beta_.get(), failed).ok());
  EXPECT_FALSE(job_->HasEnded());
  clock_.Advance(500'000'000);
  node_group_->Tick();
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "nothing comes from gamma"));
}

TEST_F(NodeGroupTest, JobSurvivesLossOfANodeWithoutRanks) {
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  engines_.Await(0)->spec.failed(Silence());  // the engine reports the lost node first
  node_group_->Lost(gamma_.get(), absl::UnavailableError("its stream has ended"));
  clock_.Advance(500'000'000);
  node_group_->Tick();
  EXPECT_FALSE(job_->HasEnded());
  const auto connects = beta_->Of(v1::AttachResponse::kConnectEngine);
  ASSERT_EQ(connects.size(), 2u);
  EXPECT_EQ(connects[1].connect_engine().node_names_size(), 2);
}

TEST_F(NodeGroupTest, ANodeIsNeededByItsJobAndThenByTheEngine) {
  const RecordingLink stranger("stranger");
  EXPECT_EQ(node_group_->NeedOf(&stranger), NodeGroup::Need::kNothing);
  EXPECT_EQ(node_group_->NeedOf(gamma_.get()), NodeGroup::Need::kRanks);
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  node_group_->Tick();
  EXPECT_EQ(node_group_->NeedOf(gamma_.get()), NodeGroup::Need::kRanks)
      << "the job launches there, too";
  for (const std::uint32_t rank : {0, 1}) ASSERT_TRUE(job_->Leave(Of(rank), /*exit=*/true).ok());
  ASSERT_TRUE(job_->Empty());
  node_group_->Tick();
  EXPECT_EQ(node_group_->NeedOf(gamma_.get()), NodeGroup::Need::kEngine)
      << "the job may start again";
  EXPECT_EQ(node_group_->NeedOf(&stranger), NodeGroup::Need::kNothing);
}

TEST_F(NodeGroupTest, ANodeIsNotNeededForARankThatHasMoved) {
  const auto delta = std::make_shared<RecordingLink>("delta");
  node_group_->AddRank(job_, 2, delta, Incarnation(2));
  EXPECT_EQ(node_group_->NeedOf(delta.get()), NodeGroup::Need::kRanks);
  EXPECT_EQ(node_group_->NeedOf(gamma_.get()), NodeGroup::Need::kEngine);
  node_group_->Lost(delta.get(), absl::UnavailableError("its stream has ended"));
  EXPECT_EQ(node_group_->NeedOf(delta.get()), NodeGroup::Need::kNothing);
}

// Jobs come and end, and their ranks join, move and leave with their node.
TEST(CountedRanksTest, ACountIsWhatAWalkOverAllRanksFinds) {
  std::mt19937 random(1);
  const auto below = [&random](std::uint32_t bound) { return random() % bound; };
  std::vector<std::shared_ptr<RecordingLink>> links;
  for (const char* const name : {"a", "b", "c"}) {
    links.push_back(std::make_shared<RecordingLink>(name));
  }
  RankCounts counts;
  std::vector<std::unique_ptr<CountedRanks>> jobs(3);
  for (int change = 0; change < 5000; ++change) {
    auto& job = jobs[below(3)];
    if (job == nullptr) job = std::make_unique<CountedRanks>(&counts);
    const auto& link = links[below(3)];
    const std::uint32_t what = below(100);
    if (what == 0) {
      job = nullptr;
    } else if (what == 1) {
      job->Clear();
    } else if (what < 8) {
      job->Forget(link.get());
    } else {
      job->Put(below(20), {link, 1});
    }
    for (const auto& one : links) {
      std::size_t found = 0;
      for (const auto& walked : jobs) {
        if (walked == nullptr) continue;
        for (const auto& [rank, linked] : walked->all()) found += linked.link == one ? 1 : 0;
      }
      ASSERT_EQ(counts.Of(one.get()), found) << "after change " << change;
    }
  }
}

TEST_F(NodeGroupTest, DetachDuringALaunchWaitsForIt) {
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  MarkReady(1);
  const auto engine = engines_.Await(0);
  ASSERT_TRUE(engine->submitted.Wait().has_value());
  ASSERT_EQ(gamma_->Of(v1::AttachResponse::kLaunch).size(), 1u);
  node_group_->Detach(gamma_);
  EXPECT_TRUE(gamma_->Of(v1::AttachResponse::kEngineEnd).empty());

  for (Exchange* exchange : engine->Take()) exchange->done(absl::OkStatus());
  ASSERT_TRUE(LaunchDone(beta_.get(), 1, 1).ok());
  EXPECT_TRUE(gamma_->Of(v1::AttachResponse::kEngineEnd).empty());
  EXPECT_FALSE(gamma_->Closed());
  ASSERT_TRUE(LaunchDone(gamma_.get(), 1, 1).ok());
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kEngineEnd).size(), 1u);
  EXPECT_TRUE(gamma_->Closed());
  EXPECT_TRUE(engine->destroyed.Wait().has_value());

  node_group_->Lost(gamma_.get(), absl::UnavailableError("its stream has ended"));
  for (const std::uint32_t rank : {0, 1}) {
    ASSERT_TRUE(job_->EndStep(Of(rank), channel_, 1, "").ok());
  }
  EXPECT_TRUE(Only<StepDoneMessage>(0).record->verdict.ok());
  MarkReady(2);
  EXPECT_FALSE(job_->HasEnded());
  ASSERT_EQ(beta_->Of(v1::AttachResponse::kConnectEngine).size(), 2u);
  EXPECT_EQ(engines_.Await(1)->spec.node_names, (std::vector<std::string>{"alpha", "beta"}));
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kConnectEngine).size(), 1u);
}

TEST_F(NodeGroupTest, DetachOfAnIdleNodeClosesItAtOnce) {
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  node_group_->Detach(gamma_);
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kEngineEnd).size(), 1u);
  EXPECT_TRUE(gamma_->Closed());
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(NodeGroupTest, AMessageLaunchesAPieceAndTheExecutorTheRest) {
  EndStepOfMany();
  std::size_t launched = LaunchedOfMany(beta_.get());
  EXPECT_GT(launched, 1u);
  EXPECT_LT(launched, kMany / 2) << "other users wait for the thread that handles the message";
  // Another message leaves the rest to the turn, too.
  ASSERT_TRUE(LaunchDone(beta_.get(), 1, 1).ok());
  EXPECT_EQ(LaunchedOfMany(beta_.get()), launched);
  while (turns_.pending() > 0) {
    turns_.RunNext();
    const std::size_t now = LaunchedOfMany(beta_.get());
    EXPECT_LT(now - launched, kMany / 2) << "in one turn";
    launched = now;
  }
  EXPECT_EQ(LaunchedOfMany(beta_.get()), kMany);
  EXPECT_EQ(LaunchedOfMany(gamma_.get()), kMany);
}

TEST_F(NodeGroupTest, LaunchesOfOnePieceAreSentTogether) {
  const int before = beta_->flushes();
  EndStepOfMany();
  EXPECT_GT(LaunchedOfMany(beta_.get()), 1u);
  EXPECT_EQ(beta_->flushes(), before + 1);
}

TEST_F(NodeGroupTest, ADetachComesBetweenTheTurnsOfAStep) {
  const std::uint32_t many = AgreeOn("many", kMany);
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  for (const std::uint32_t rank : {0, 1}) {
    ASSERT_TRUE(job_->FinishStep(Of(rank), many, 1, "").ok());
  }
  const std::size_t launched = beta_->Of(v1::AttachResponse::kLaunch).size();
  ASSERT_LT(launched, kMany);
  node_group_->Detach(gamma_);
  turns_.RunAll();
  EXPECT_EQ(beta_->Of(v1::AttachResponse::kLaunch).size(), launched) << "gamma is leaving";
  FinishFirst(launched);
  EXPECT_TRUE(gamma_->Closed());
  turns_.RunAll();
  EXPECT_EQ(beta_->Of(v1::AttachResponse::kLaunch).size(), kMany);
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kLaunch).size(), launched);
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(NodeGroupTest, ALossFailsTheLaunchesThatWaitForTheirTurn) {
  EndStepOfMany();
  ASSERT_LT(LaunchedOfMany(beta_.get()), kMany);
  node_group_->Lost(gamma_.get(), absl::UnavailableError("its stream has ended"));
  turns_.RunAll();
  EXPECT_LT(LaunchedOfMany(beta_.get()), kMany);
  EXPECT_TRUE(job_->HasEnded());
}

TEST_F(NodeGroupTest, AGroupThatIsShutDownNeedsNoTurn) {
  const std::uint32_t many = AgreeOn("many", kMany);
  node_group_->Shutdown();
  for (const std::uint32_t rank : {0, 1, 2}) {
    ASSERT_TRUE(job_->FinishStep(Of(rank), many, 1, "").ok());
  }
  EXPECT_EQ(turns_.pending(), 0u);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "a node of the job is being lost"));
}

// A thread that has taken a piece asks the job, without the group's lock. Here the job is busy.
TEST_F(NodeGroupTest, AGroupThatIsShutDownDuringATurnLaunchesNothingMore) {
  EndStepOfMany();
  const std::size_t launched = LaunchedOfMany(beta_.get());
  FinishFirst(launched);
  ASSERT_EQ(turns_.pending(), 1u) << "some are left";
  Gate busy, release;
  on_message_ = [&](const SessionMessage&) {
    busy.Open();
    release.Wait();
  };
  ASSERT_TRUE(job_->RegisterLayout(Of(0), Request(Spec(1, "late"), clock_.NowNs())).ok());
  std::thread ticks([&] { job_->Tick(); });  // the registration has come too late
  busy.Wait();
  std::atomic<pid_t> id{0};
  std::thread turn([&] {
    id = ThisThread();
    turns_.RunNext();
  });
  ASSERT_TRUE(Soon([&] { return id != 0; }));
  AwaitSleep(id);
  node_group_->Shutdown();
  release.Open();
  ticks.join();
  turn.join();
  on_message_ = nullptr;
  EXPECT_EQ(turns_.pending(), 0u);
  EXPECT_EQ(LaunchedOfMany(beta_.get()), launched);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "a node of the job is being lost"));
}

// After Shutdown() the executor may be gone.
TEST_F(NodeGroupTest, AGroupThatIsShutDownDuringALaunchCallsTheExecutorNoMore) {
  std::size_t before = 0;
  const std::uint32_t many = AgreeOn("many", kMany);
  beta_->OnFlush([&] {
    node_group_->Shutdown();
    before = turns_.pending();
  });
  for (const std::uint32_t rank : {0, 1, 2}) {
    ASSERT_TRUE(job_->FinishStep(Of(rank), many, 1, "").ok());
  }
  EXPECT_EQ(before, 1u);
  EXPECT_EQ(turns_.pending(), before);
}

TEST_F(NodeGroupTest, LaunchDuringADetachWaitsForTheNextEngine) {
  const std::uint32_t other = AgreeOn("other");
  const auto engine = DetachInMidLaunch(other);
  EXPECT_EQ(beta_->Of(v1::AttachResponse::kLaunch).size(), 1u);

  for (Exchange* exchange : engine->Take()) exchange->done(absl::OkStatus());
  ASSERT_TRUE(LaunchDone(beta_.get(), 1, 1).ok());
  ASSERT_TRUE(LaunchDone(gamma_.get(), 1, 1).ok());
  const auto launches = beta_->Of(v1::AttachResponse::kLaunch);
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[1].launch().epoch(), 2u);
  EXPECT_EQ(launches[1].launch().channel(), other);
  EXPECT_EQ(gamma_->Of(v1::AttachResponse::kLaunch).size(), 1u);
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(NodeGroupTest, LossDuringADetachFailsWaitingLaunches) {
  const std::uint32_t other = AgreeOn("other");
  const auto engine = DetachInMidLaunch(other);
  node_group_->Lost(gamma_.get(), absl::UnavailableError("its stream has ended"));
  ASSERT_TRUE(engine->destroyed.Wait().has_value());
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty());
  ASSERT_TRUE(LaunchDone(beta_.get(), 1, 1).ok());
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "its stream has ended"));
}

// An engine can block while it connects to a lost host.
TEST_F(NodeGroupTest, ConnectingEngineDoesNotDelayTheEndOfOtherJobs) {
  Event connecting, release;
  const auto stuck =
      MakeNodeGroup([&](const EngineSpec&) -> absl::StatusOr<std::unique_ptr<Engine>> {
        connecting.Set();
        EXPECT_TRUE(release.Wait().has_value());
        return absl::UnavailableError("nobody is there");
      });
  stuck->Tick();
  ASSERT_TRUE(connecting.Wait().has_value());
  stuck->Shutdown();

  const auto engine = engines_.Await(0);
  node_group_->Shutdown();
  EXPECT_TRUE(engine->destroyed.Wait().has_value());
  release.Set();
  reaper_.reset();  // the reaper uses the events
}

// Otherwise those nodes would refuse the engine.
TEST(EngineEpochTest, NoNodeGetsMoreLanesOrLargerChunksThanItAllows) {
  ConcurrentExecutor reaper(8);
  ManualClock clock;
  EngineMakers engines;
  NodeGroupEnvironment environment;
  environment.node_name = "alpha";
  environment.address = "127.0.0.1";
  environment.engine.lanes = 8;
  environment.engine.chunk_bytes = std::size_t{4} << 20;
  environment.make_engine = engines.Maker();
  environment.reaper = &reaper;
  environment.clock = &clock;
  const auto beta = std::make_shared<RecordingLink>("beta", EngineLimits{3, std::size_t{8} << 20});
  const auto gamma =
      std::make_shared<RecordingLink>("gamma", EngineLimits{16, std::size_t{1} << 20});
  const auto epoch = std::make_shared<EngineEpoch>(1, Tenant(1000), NodeLinks{beta, gamma},
                                                   environment, [](const absl::Status&) {});
  EXPECT_EQ(epoch->settings().lanes, 3);
  EXPECT_EQ(epoch->settings().chunk_bytes, std::size_t{1} << 20);
  EXPECT_EQ(engines.Await(0)->spec.settings.lanes, 3);
  EXPECT_EQ(engines.Await(0)->spec.settings.chunk_bytes, std::size_t{1} << 20);
  for (const auto& link : {beta, gamma}) {
    const auto connects = link->Of(v1::AttachResponse::kConnectEngine);
    ASSERT_EQ(connects.size(), 1u);
    EXPECT_EQ(connects[0].connect_engine().lanes(), 3u);
    EXPECT_EQ(connects[0].connect_engine().chunk_bytes(), std::uint64_t{1} << 20);
  }
  epoch->Fail(absl::CancelledError("the test ends"));
  EngineEpoch::Reap(epoch, &reaper);
}

// Rank 1 on beta sends to rank 2 on gamma, through this node.
TEST(EngineEpochTest, BroadcastBetweenOtherNodesIsCharged) {
  ConcurrentExecutor reaper(8);
  ManualClock clock;
  ArenaQuota memory(1000);
  EngineMakers engines;
  NodeGroupEnvironment environment;
  environment.node_name = "alpha";
  environment.address = "127.0.0.1";
  environment.make_engine = engines.Maker();
  environment.reaper = &reaper;
  environment.clock = &clock;
  environment.memory = &memory;
  const auto beta = std::make_shared<RecordingLink>("beta");
  const auto gamma = std::make_shared<RecordingLink>("gamma");
  const auto epoch = std::make_shared<EngineEpoch>(1, Tenant(1000), NodeLinks{beta, gamma},
                                                   environment, [](const absl::Status&) {});
  const LinkedRanks ranks = {{1, {beta, 1}}, {2, {gamma, 2}}};
  const auto engine = engines.Await(0);

  const auto broadcast = [&](std::size_t bytes) {
    ReduceOperation operation;
    operation.count = bytes;
    operation.ranks = {1, 2};
    NodeBroadcast& work = operation.work.emplace<NodeBroadcast>();
    work.buffers = {nullptr, nullptr};
    work.root = 1;
    std::uint64_t launch = 0;
    const absl::Status status = epoch->Launch(
        &operation, nullptr, {&memory, Tenant(1000)}, ranks,
        [](std::uint64_t, const absl::Status&, const std::optional<GradientStats>&) {}, &launch);
    for (NodeLink* const link : std::vector<NodeLink*>{nullptr, beta.get(), gamma.get()}) {
      epoch->ledger().Answer(link, launch, {status, std::nullopt, false, {}});
    }
    return status;
  };
  EXPECT_TRUE(broadcast(1000).ok());
  ASSERT_TRUE(engine->submitted.Wait().has_value());
  EXPECT_EQ(memory.total_bytes(), 1000u);
  engine->broadcast_done(absl::OkStatus());
  EXPECT_EQ(memory.total_bytes(), 0u);
  const absl::Status refused = broadcast(1001);
  EXPECT_EQ(DetailsOf(refused).reason, "QUOTA") << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "node alpha")) << refused;
  epoch->Fail(absl::CancelledError("the test ends"));
  EngineEpoch::Reap(epoch, &reaper);
}

}  // namespace
}  // namespace gradsync::daemon
