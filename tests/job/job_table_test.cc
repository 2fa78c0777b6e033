#include "daemon/job/job_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "tests/job/held_reducer.h"
#include "tests/job/manual_executor.h"
#include "tests/job/recording_sink.h"
#include "tests/job/trainer_memory.h"
#include "tests/kit/gate.h"
#include "tests/kit/manual_clock.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kQuota = 3;
const PodId kPodA = *PodId::Parse("6f1e0c4a93d24a578f0e1b2c3d4e5f60");
const PodId kPodB = *PodId::Parse("0a4d5e7c111142229333abcdefabcdef");

JobKey Key(uid_t uid = 1000, const std::string& job_id = "run",
           const std::string& token_hash = "") {
  return {uid, job_id, token_hash};
}

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the daemon stops");
}

// Runs all work within the call, and what a test wants done before it.
class ImmediateExecutor final : public UserExecutor {
 public:
  void Run(const Tenant& /*user*/, std::function<void()> work) override {
    if (before_) std::exchange(before_, nullptr)();
    work();
  }
  // Calls `before` once, before the next work.
  void Before(std::function<void()> before) { before_ = std::move(before); }

 private:
  std::function<void()> before_;
};

// Schedulers and workers are found by this text.
TEST(JobKeyTest, TextIsDifferentForEveryHash) {
  const std::string begin(31, '\x5a');
  EXPECT_NE(Key(1000, "run", begin + '\1').Text(), Key(1000, "run", begin + '\2').Text());
  EXPECT_NE(Key(1000, "run", begin + '\1').Text(), Key(1000, "run").Text());
  EXPECT_EQ(Key(1000, "run").Text(), "1000/run");
}

class JobTableTest : public testing::Test {
 protected:
  JobTableTest() : table_(Environment(), kQuota) {}

  struct Session {
    std::uint64_t incarnation = 0;
    std::shared_ptr<RecordingSink> sink;
    absl::StatusOr<std::shared_ptr<Job>> job;

    RankSession Of(std::uint32_t rank) const { return {rank, incarnation}; }
    bool Ended() const { return !sink->Of<SessionEndMessage>().empty(); }
    absl::Status end() const { return sink->Of<SessionEndMessage>().at(0).status; }
  };

  Session Join(std::uint32_t rank, std::uint32_t world_size = 2, const JobKey& key = Key(),
               const JobOptions& options = {}, PodId pod = {}, const std::string& node = "") {
    Session session;
    session.incarnation = ++incarnation_;
    session.sink = std::make_shared<RecordingSink>();
    session.job = table_.Join(key, rank, world_size, options, session.incarnation, session.sink,
                              {node, pod, nullptr});
    return session;
  }
  static std::uint64_t GenerationOf(const Session& session) {
    return session.job.ok() ? (*session.job)->identity().generation : 0;
  }
  static void Lose(const Session& session, std::uint32_t rank) {
    (*session.job)
        ->Lose(session.Of(rank),
               MakeError(absl::StatusCode::kAborted, reason::kProcessEnded, "ended"));
  }
  static void ExpectSaid(const absl::Status& status, absl::StatusCode code,
                         const std::string& reason, std::initializer_list<const char*> parts) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(DetailsOf(status).reason, reason);
    for (const char* part : parts) {
      EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in: " << status;
    }
  }

  // Starts a step with a bucket that is being reduced. The session's rank is alone in its job.
  void BeginStep(const Session& session) {
    LayoutRequest request;
    request.spec.name = "model";
    request.spec.explicit_buckets = {{DataType::kFloat32, 4}};
    const auto registered = (*session.job)->RegisterLayout(session.Of(0), request);
    ASSERT_TRUE(registered.ok()) << registered.status();
    ASSERT_TRUE(
        (*session.job)->ArenaMapped(session.Of(0), registered->channel, memory_.Share()).ok());
    ASSERT_TRUE((*session.job)->MarkReady(session.Of(0), registered->channel, 1, {0}).ok());
    ASSERT_EQ(reducer_.held().size(), 1u);
  }

  // Both ranks of a job of two make a layout and do its first step.
  void DoStep(const Session (&sessions)[2]) {
    LayoutRequest request;
    request.spec.name = "model";
    request.spec.explicit_buckets = {{DataType::kFloat32, 4}};
    request.deadline_ns = ~std::uint64_t{0};
    for (const std::uint32_t rank : {0u, 1u}) {
      const Session& session = sessions[rank];
      ASSERT_TRUE((*session.job)->RegisterLayout(session.Of(rank), request).ok());
    }
    for (const std::uint32_t rank : {0u, 1u}) {
      const Session& session = sessions[rank];
      const RankMemory memory = (rank == 0 ? memory_ : other_memory_).Share();
      ASSERT_TRUE((*session.job)->ArenaMapped(session.Of(rank), 1, memory).ok());
    }
    for (const std::uint32_t rank : {0u, 1u}) {
      ASSERT_TRUE((*sessions[rank].job)->FinishStep(sessions[rank].Of(rank), 1, 1, "").ok());
    }
    reducer_.CompleteAll();
  }

  JobEnvironment Environment() {
    JobEnvironment environment;
    environment.clock = &clock_;
    environment.reducer = &reducer_;
    environment.executor = &executor_;
    environment.log_other_token = [this](uid_t uid, const std::string& job_id) {
      logged_.push_back(absl::StrCat(uid, "/", job_id));
    };
    return environment;
  }

  ManualClock clock_;
  HeldReducer reducer_{&clock_};
  ManualExecutor executor_;
  JobTable table_;
  TrainerMemory memory_{4096, 1};
  TrainerMemory other_memory_{4096, 1};
  std::uint64_t incarnation_ = 0;
  std::vector<std::string> logged_;  // about other tokens
};

TEST_F(JobTableTest, RanksWithTheSameKeyJoinTheSameJob) {
  const Session a = Join(0);
  const Session b = Join(1);
  ASSERT_TRUE(a.job.ok() && b.job.ok());
  EXPECT_EQ(*a.job, *b.job);
  EXPECT_TRUE((*a.job)->Formed());
  EXPECT_EQ(GenerationOf(a), 1u);
  EXPECT_EQ((*a.job)->Snapshot().phase, JobPhase::kRunning);
}

TEST_F(JobTableTest, DifferentUserNameOrTokenMeansADifferentJob) {
  const Session mine = Join(0);
  for (const JobKey& key : {Key(1001), Key(1000, "other"), Key(1000, "run", "token")}) {
    const Session theirs = Join(0, 2, key);
    ASSERT_TRUE(theirs.job.ok());
    EXPECT_NE(*theirs.job, *mine.job);
  }
  EXPECT_EQ(table_.Jobs().size(), 4u);
  EXPECT_FALSE(mine.Ended());
}

// What happens with a rank that has a wrong token: it waits, and hears why.
TEST_F(JobTableTest, TimeOutNamesTheJobOfTheSameIdWithAnotherToken) {
  const auto timed_out = [this](const Session& session, std::uint32_t rank) {
    LayoutRequest request;
    request.spec.name = "model";
    request.spec.explicit_buckets = {{DataType::kFloat32, 4}};
    request.deadline_ns = clock_.NowNs();
    EXPECT_TRUE((*session.job)->RegisterLayout(session.Of(rank), request).ok());
    const std::vector<LayoutFailedMessage> before = session.sink->Of<LayoutFailedMessage>();
    table_.Tick();
    const std::vector<LayoutFailedMessage> after = session.sink->Of<LayoutFailedMessage>();
    EXPECT_EQ(after.size(), before.size() + 1);
    return after.empty() ? absl::OkStatus() : after.back().status;
  };
  constexpr char kHint[] = "Ranks with another token have joined a job with the same job_id";
  const Session right = Join(0, 2, Key(1000, "run", "right"));
  EXPECT_FALSE(absl::StrContains(timed_out(right, 0).message(), kHint)) << "no other job yet";
  EXPECT_TRUE(Join(0, 2, Key(1000, "other", "wrong")).job.ok());
  EXPECT_TRUE(Join(0, 2, Key(1001, "run", "wrong")).job.ok());
  EXPECT_FALSE(absl::StrContains(timed_out(right, 0).message(), kHint)) << "no stranger counts";
  EXPECT_TRUE(logged_.empty());

  const Session wrong = Join(1, 2, Key(1000, "run", "wrong"));
  EXPECT_EQ(logged_, std::vector<std::string>{"1000/run"});
  for (const auto& [session, rank] : {std::make_pair(right, 0u), std::make_pair(wrong, 1u)}) {
    ExpectSaid(timed_out(session, rank), absl::StatusCode::kDeadlineExceeded, "LAYOUT_TIMEOUT",
               {kHint, "GRADSYNC_JOB_TOKEN"});
  }
  const Session last = Join(1, 2, Key(1000, "run", "right"));
  EXPECT_TRUE((*right.job)->Formed());
  EXPECT_EQ(logged_.size(), 1u) << "it is said once";
  EXPECT_FALSE(right.Ended() || wrong.Ended() || last.Ended());
}

TEST_F(JobTableTest, OccupiedRankIsRefusedWhileTheJobForms) {
  const Session held = Join(0, 3);
  const Session second = Join(0, 3);
  ExpectSaid(second.job.status(), absl::StatusCode::kAlreadyExists, "RANK_OCCUPIED",
             {"rank 0", "'run'", "still forming"});
  EXPECT_FALSE(held.Ended());
  EXPECT_TRUE(Join(1, 3).job.ok());
}

TEST_F(JobTableTest, DifferentWorldSizeOrOptionIsRefusedWithBothValues) {
  ASSERT_TRUE(Join(0).job.ok());
  ExpectSaid(Join(1, 3).job.status(), absl::StatusCode::kFailedPrecondition, "JOB_MISMATCH",
             {"rank 1", "world_size is 3", "have 2"});
  ExpectSaid(Join(2, 3).job.status(), absl::StatusCode::kFailedPrecondition, "JOB_MISMATCH",
             {"world_size is 3", "have 2"});
  JobOptions options;
  options.divide_by_world = true;
  ExpectSaid(Join(1, 2, Key(), options).job.status(), absl::StatusCode::kFailedPrecondition,
             "JOB_MISMATCH", {"divisor is world", "have live_ranks"});
  options = JobOptions();
  options.step_timeout_ns = 5'000'000;
  ExpectSaid(Join(1, 2, Key(), options).job.status(), absl::StatusCode::kFailedPrecondition,
             "JOB_MISMATCH", {"step_timeout_ms is 5", "have 0"});
  const auto expect_refused = [this](const NcclSettings& nccl, const char* says) {
    JobOptions other;
    other.nccl = nccl;
    ExpectSaid(Join(1, 2, Key(), other).job.status(), absl::StatusCode::kFailedPrecondition,
               "JOB_MISMATCH", {says});
  };
  expect_refused({8, {}, {}, {}}, "nccl.max_ctas is 8, but the ranks that joined before have 0");
  expect_refused({0, NcclAlgorithm::kRing, {}, {}}, "nccl.algorithm is Ring, but");
  expect_refused({0, {}, NcclProtocol::kLl, {}}, "nccl.protocol is LL, but");
  expect_refused({0, {}, {}, NcclWireType::kSame}, "nccl.wire_type is same, but");
  expect_refused({0, {}, {}, NcclWireType::kBfloat16},
                 "nccl.wire_type is bfloat16, but the ranks that joined before have auto");
  EXPECT_TRUE(Join(1).job.ok());
}

TEST_F(JobTableTest, AnyJoiningRankSupersedesAFullJob) {
  const Session a = Join(0);
  const Session b = Join(1);
  const Session next = Join(1);
  ASSERT_TRUE(next.job.ok());
  EXPECT_EQ(GenerationOf(next), 2u);
  for (const Session* old : {&a, &b}) {
    ASSERT_TRUE(old->Ended());
    ExpectSaid(old->end(), absl::StatusCode::kAborted, "SUPERSEDED",
               {"newer generation", "'run'", "rank 1"});
  }
  EXPECT_FALSE(next.Ended());
  const Session other = Join(0);
  ASSERT_TRUE(other.job.ok());
  EXPECT_EQ(*other.job, *next.job);
}

TEST_F(JobTableTest, NewGenerationMayHaveAnotherWorldSize) {
  Join(0);
  Join(1);
  const Session first = Join(2, 3);  // not a rank of the old world
  ASSERT_TRUE(first.job.ok()) << first.job.status();
  EXPECT_EQ(GenerationOf(first), 2u);
  Join(0, 3);
  Join(1, 3);
  EXPECT_TRUE((*first.job)->Formed());
  const Session smaller = Join(0, 1);
  EXPECT_EQ(GenerationOf(smaller), 3u);
  EXPECT_TRUE((*smaller.job)->Formed());
}

TEST_F(JobTableTest, NewGenerationStartsBeforeOldReductionsFinish) {
  const Session old = Join(0, 1);
  BeginStep(old);
  const Session next = Join(0, 1);
  EXPECT_EQ(GenerationOf(next), 2u);
  EXPECT_FALSE(old.Ended());
  table_.Tick();
  EXPECT_EQ(table_.Jobs().size(), 2u);
  EXPECT_FALSE((*old.job)->Empty());
  reducer_.CompleteAll();
  EXPECT_TRUE(old.Ended());
  table_.Tick();
  executor_.RunAll();
  EXPECT_FALSE(memory_.Shared());
  // The live job comes first, then the ended one.
  ASSERT_EQ(table_.Jobs().size(), 2u);
  EXPECT_EQ(table_.Jobs()[0], *next.job);
  EXPECT_EQ(table_.Jobs()[1], *old.job);
}

TEST_F(JobTableTest, GenerationThatEndsLateDoesNotMakeNumbersRepeat) {
  const Session first = Join(0, 1);
  BeginStep(first);
  const Session second = Join(0, 1);
  Lose(second, 0);
  table_.Tick();
  reducer_.CompleteAll();  // only now has the first generation ended
  table_.Tick();
  EXPECT_EQ(GenerationOf(Join(0, 1)), 3u);
}

TEST_F(JobTableTest, DrainEndsIdleJobsAndWaitsForRunningSteps) {
  const Session idle = Join(0, 2, Key(1000, "idle"));
  const Session busy = Join(0, 1, Key(1000, "busy"));
  BeginStep(busy);
  EXPECT_FALSE(table_.EndIdle(Draining()));
  EXPECT_EQ(DetailsOf(idle.end()).reason, "DRAINING");
  EXPECT_FALSE(busy.Ended());
  reducer_.CompleteAll();
  EXPECT_FALSE(table_.EndIdle(Draining()));
  ASSERT_TRUE((*busy.job)->EndStep(busy.Of(0), 1, 1, "").ok());
  EXPECT_TRUE(busy.sink->Of<StepDoneMessage>().at(0).record->verdict.ok());
  EXPECT_TRUE(table_.EndIdle(Draining()));
  EXPECT_EQ(DetailsOf(busy.end()).reason, "DRAINING");
}

TEST_F(JobTableTest, LossWhileTheJobFormsAllowsANewGeneration) {
  const Session lost = Join(0, 3);
  const Session waiting = Join(1, 3);
  Lose(lost, 0);
  EXPECT_TRUE(waiting.Ended());
  // A rank that had not joined before may begin it, too.
  const Session next = Join(2, 3);
  ASSERT_TRUE(next.job.ok()) << next.job.status();
  EXPECT_EQ(GenerationOf(next), 2u);
}

// It is refused, so it begins no generation, and ends none.
TEST_F(JobTableTest, HoldOfAnotherNodeLeavesTheJobAlone) {
  JobOptions hold;
  hold.on_rank_loss = OnRankLoss::kHold;
  hold.step_timeout_ns = hold.hold_timeout_ns = 1'000'000'000;
  const Session sessions[] = {Join(0), Join(1)};
  ExpectSaid(Join(1, 2, Key(), hold, {}, "beta").job.status(), absl::StatusCode::kUnimplemented,
             "LOSS_POLICY", {"rank 1 on node beta"});
  EXPECT_FALSE(sessions[0].Ended());
  EXPECT_FALSE(sessions[1].Ended());
  DoStep(sessions);
  EXPECT_EQ(table_.Jobs().size(), 1u);
}

TEST_F(JobTableTest, HeldRankIsReplacedInItsGeneration) {
  JobOptions options;
  options.on_rank_loss = OnRankLoss::kHold;
  options.step_timeout_ns = options.hold_timeout_ns = 1'000'000'000;
  const Session sessions[] = {Join(0, 2, Key(), options), Join(1, 2, Key(), options)};
  DoStep(sessions);
  ExpectSaid(Join(1, 2, Key(), options).job.status(), absl::StatusCode::kAlreadyExists,
             "RANK_OCCUPIED", {"rank 1", "only after its loss"});
  Lose(sessions[1], 1);
  EXPECT_FALSE(sessions[0].Ended());
  JobOptions other = options;
  other.on_rank_loss = OnRankLoss::kAbort;
  ExpectSaid(Join(1, 2, Key(), other).job.status(), absl::StatusCode::kFailedPrecondition,
             "JOB_MISMATCH", {"on_rank_loss is abort", "have hold"});
  const Session next = Join(1, 2, Key(), options);
  ASSERT_TRUE(next.job.ok()) << next.job.status();
  EXPECT_EQ(*next.job, *sessions[0].job);
  EXPECT_EQ(GenerationOf(next), 1u);
  EXPECT_FALSE(sessions[0].Ended());
  (*next.job)->End(absl::AbortedError("the test has ended"));
  executor_.RunAll();
}

TEST_F(JobTableTest, RankThatHasLeftAHeldJobIsNotReplaced) {
  JobOptions options;
  options.on_rank_loss = OnRankLoss::kHold;
  const std::vector<Session> sessions = {Join(0, 2, Key(), options), Join(1, 2, Key(), options)};
  for (const std::uint32_t rank : {0u, 1u}) {
    const Session& session = sessions[rank];
    ASSERT_TRUE((*session.job)->Leave(session.Of(rank), /*exit=*/true).ok());
    EXPECT_TRUE(session.Ended());
  }
  const auto expect_refused = [&] {
    ExpectSaid(Join(1, 2, Key(), options).job.status(), absl::StatusCode::kFailedPrecondition,
               "LEFT", {"rank 1 of job 'run' has left", "another job_id"});
  };
  expect_refused();
  table_.Tick();  // retires it
  expect_refused();
  // Another run, and a run with another policy, begin.
  EXPECT_TRUE(Join(1, 2, Key(1000, "next run"), options).job.ok());
  EXPECT_EQ(GenerationOf(Join(1)), 2u);
}

TEST_F(JobTableTest, HeldJobThatHasFailedBeginsItsNextGeneration) {
  JobOptions options;
  options.on_rank_loss = OnRankLoss::kHold;
  const Session first = Join(0, 2, Key(), options);
  Lose(first, 0);  // rank 1 has not joined, so nothing is held
  EXPECT_EQ(GenerationOf(Join(0, 2, Key(), options)), 2u);
}

TEST_F(JobTableTest, RankThatExitsWhileTheJobFormsMayRejoin) {
  const Session left = Join(0, 3);
  const Session waiting = Join(1, 3);
  ASSERT_TRUE((*left.job)->Leave(left.Of(0), /*exit=*/true).ok());
  const Session again = Join(0, 3);
  ASSERT_TRUE(again.job.ok()) << again.job.status();
  EXPECT_EQ(GenerationOf(again), 2u);
  ExpectSaid(waiting.end(), absl::StatusCode::kAborted, "SUPERSEDED", {"rank 0"});
}

// A trainer that finishes and joins again must not end the others, which finish later.
TEST_F(JobTableTest, RankThatFinishesAndRejoinsDoesNotSupersedeItsJob) {
  const Session finished = Join(0);
  const Session other = Join(1);
  ASSERT_TRUE((*finished.job)->Finish(finished.Of(0)).ok());
  const Session again = Join(0);
  ASSERT_TRUE(again.job.ok()) << again.job.status();
  EXPECT_EQ(GenerationOf(again), 2u);
  table_.Tick();
  EXPECT_FALSE(other.Ended());
  ASSERT_TRUE((*other.job)->Finish(other.Of(1)).ok());
  EXPECT_TRUE(other.end().ok()) << other.end();
}

// A trainer that leaves and joins again must not end the others, which go on without it.
TEST_F(JobTableTest, RankThatLeavesAFullJobAndRejoinsDoesNotSupersedeIt) {
  const Session left = Join(0);
  const Session other = Join(1);
  ASSERT_TRUE((*left.job)->Leave(left.Of(0), /*exit=*/true).ok());
  const Session again = Join(0);
  ASSERT_TRUE(again.job.ok()) << again.job.status();
  EXPECT_EQ(GenerationOf(again), 2u);
  table_.Tick();
  EXPECT_FALSE(other.Ended());
  EXPECT_FALSE((*other.job)->HasEnded());
  ASSERT_TRUE((*other.job)->Leave(other.Of(1), /*exit=*/true).ok());
  EXPECT_TRUE(other.end().ok()) << other.end();
  // Now it comes after the first one.
  const Session next = Join(1);
  ASSERT_TRUE(next.job.ok());
  EXPECT_EQ(*next.job, *again.job);
  EXPECT_TRUE((*next.job)->Formed());
  table_.Tick();
  EXPECT_EQ(table_.Jobs().size(), 2u);
  EXPECT_EQ((*left.job)->Snapshot().phase, JobPhase::kEnded);
}

TEST_F(JobTableTest, RankThatJoinsTheNextGenerationWithoutLeavingSupersedesTheOldOne) {
  const Session left = Join(0, 3);
  const Session restarted = Join(1, 3);
  const Session third = Join(2, 3);
  ASSERT_TRUE((*left.job)->Leave(left.Of(0), /*exit=*/true).ok());
  const Session again = Join(0, 3);
  JobOptions other_options;
  other_options.divide_by_world = true;
  EXPECT_FALSE(Join(1, 3, Key(), other_options).job.ok());
  EXPECT_FALSE(third.Ended());  // a rank that is refused ends nothing
  const Session next = Join(1, 3);
  ASSERT_TRUE(next.job.ok());
  EXPECT_EQ(*next.job, *again.job);
  for (const Session* old : {&restarted, &third}) {
    ASSERT_TRUE(old->Ended());
    ExpectSaid(old->end(), absl::StatusCode::kAborted, "SUPERSEDED", {"rank 1"});
  }
  EXPECT_FALSE(again.Ended());
}

TEST_F(JobTableTest, GenerationNumbersContinueAfterAJobHasEnded) {
  const Session first = Join(0, 1);
  ASSERT_TRUE((*first.job)->Leave(first.Of(0), /*exit=*/true).ok());
  table_.Tick();
  const Session second = Join(0, 1);
  EXPECT_EQ(GenerationOf(second), 2u);
  EXPECT_TRUE(second.sink->messages().empty());
  Lose(second, 0);
  table_.Tick();
  EXPECT_EQ(GenerationOf(Join(0, 1)), 3u);
}

TEST_F(JobTableTest, SuccessorOrDrainDoesNotFailAJobThatEndedWell) {
  const Session a = Join(0, 1, Key(1000, "a"));
  const Session b = Join(0, 1, Key(1000, "b"));
  ASSERT_TRUE((*a.job)->Leave(a.Of(0), /*exit=*/true).ok());
  ASSERT_TRUE((*b.job)->Leave(b.Of(0), /*exit=*/true).ok());
  // The table has not noticed yet that they have ended.
  const Session next = Join(0, 1, Key(1000, "a"));
  EXPECT_EQ(GenerationOf(next), 2u);
  table_.EndAll(Draining());
  table_.Tick();
  EXPECT_EQ((*a.job)->Snapshot().phase, JobPhase::kEnded);
  EXPECT_EQ((*b.job)->Snapshot().phase, JobPhase::kEnded);
  EXPECT_EQ((*a.job)->Snapshot().failure, "");
  EXPECT_EQ(a.sink->messages().size(), 1u);
  EXPECT_EQ(table_.jobs_failed(), 1u);  // the generation that EndAll() ended
}

TEST_F(JobTableTest, QuotaCountsTheLiveJobsOfAUser) {
  for (std::size_t i = 0; i < kQuota; ++i) {
    ASSERT_TRUE(Join(0, 2, Key(1000, absl::StrCat("run", i))).job.ok());
  }
  ExpectSaid(Join(0, 2, Key(1000, "one more")).job.status(), absl::StatusCode::kResourceExhausted,
             "QUOTA", {"user 1000", "3 jobs", "quota_jobs_per_user"});
  EXPECT_TRUE(Join(0, 2, Key(1001)).job.ok());
  // A second rank or a new generation of an existing job does not count as a new job.
  const Session full = Join(1, 2, Key(1000, "run0"));
  ASSERT_TRUE(full.job.ok());
  EXPECT_EQ(GenerationOf(Join(1, 2, Key(1000, "run0"))), 2u);
  // A job that has ended does not count, even before the next Tick().
  const Session ended = Join(1, 2, Key(1000, "run1"));
  Lose(ended, 1);
  EXPECT_TRUE(Join(0, 2, Key(1000, "one more")).job.ok());
}

TEST_F(JobTableTest, QuotaCountsTheJobsOfEachPodOfAUser) {
  for (std::size_t i = 0; i < kQuota; ++i) {
    // A token multiplies no quota.
    ASSERT_TRUE(Join(0, 2, Key(1000, "run", absl::StrCat("token", i)), {}, kPodB).job.ok());
  }
  ExpectSaid(Join(0, 2, Key(1000, "run", "one more"), {}, kPodB).job.status(),
             absl::StatusCode::kResourceExhausted, "QUOTA",
             {"user 1000 in pod", kPodB.Text().c_str(), "3 jobs"});
  EXPECT_TRUE(Join(0, 2, Key(1000, "run", "mine"), {}, kPodA).job.ok());
  EXPECT_TRUE(Join(0, 2, Key(1000, "run", "in no pod")).job.ok());
  // The ranks of one job may be in several pods. It counts as the first one's.
  EXPECT_TRUE(Join(1, 2, Key(1000, "run", "mine"), {}, kPodB).job.ok());
}

TEST_F(JobTableTest, JobIsSeenFromThePodsOfItsRanks) {
  const Session first = Join(0, 2, Key(), {}, kPodA);
  ASSERT_TRUE(first.job.ok());
  const Job& job = **first.job;
  EXPECT_TRUE(job.HasRankIn(kPodA));
  EXPECT_FALSE(job.HasRankIn(kPodB));
  EXPECT_FALSE(job.HasRankIn(PodId()));
  ASSERT_TRUE(Join(1, 2, Key(), {}, kPodB).job.ok());
  EXPECT_TRUE(job.HasRankIn(kPodB));
  Lose(first, 0);
  table_.Tick();
  EXPECT_TRUE(job.HasRankIn(kPodA)) << "its failure can still be asked for";
}

// A stranger in another pod has the same user and knows the job's id. It makes a job that holds a
// lost rank, so that the real one cannot begin.
TEST_F(JobTableTest, RankThatIsHeldInAnotherPodBlocksNoJob) {
  JobOptions options;
  options.on_rank_loss = OnRankLoss::kHold;
  options.step_timeout_ns = options.hold_timeout_ns = 1'000'000'000;
  const JobKey theirs = Key(1000, "run", "stranger");
  const Session strangers[] = {Join(0, 2, theirs, options, kPodB),
                               Join(1, 2, theirs, options, kPodB)};
  DoStep(strangers);
  Lose(strangers[1], 1);
  ASSERT_TRUE((*strangers[0].job)->IsHeld(1));
  const Session mine = Join(1, 2, Key(1000, "run", "mine"), options, kPodA);
  ASSERT_TRUE(mine.job.ok()) << mine.job.status();
  EXPECT_NE(*mine.job, *strangers[0].job);
  // In the pod of the job it is a replacement with a wrong token.
  ExpectSaid(Join(1, 2, Key(1000, "run", "wrong"), options, kPodB).job.status(),
             absl::StatusCode::kPermissionDenied, "CREDENTIALS", {"rank 1", "another job token"});
  (*strangers[0].job)->End(absl::AbortedError("the test has ended"));
  executor_.RunAll();
}

TEST_F(JobTableTest, RefusedRankLeavesNoJobBehind) {
  for (std::size_t i = 0; i < kQuota; ++i) Join(0, 2, Key(1000, absl::StrCat("run", i)));
  Join(0, 2, Key(1000, "one more"));
  EXPECT_EQ(table_.Jobs().size(), kQuota);
}

TEST_F(JobTableTest, StatisticsOutliveTheTrainersUpToSixteenJobs) {
  for (int i = 0; i < 20; ++i) {
    const Session session = Join(0, 1, Key(1000, absl::StrCat("run", i)));
    ASSERT_TRUE(session.job.ok());
    Lose(session, 0);
    table_.Tick();
  }
  const auto jobs = table_.Jobs();
  ASSERT_EQ(jobs.size(), 16u);
  EXPECT_EQ(jobs.front()->identity().job_id, "run19");
  EXPECT_EQ(jobs.back()->identity().job_id, "run4");
  EXPECT_EQ(jobs.front()->Snapshot().phase, JobPhase::kFailed);
  EXPECT_EQ(table_.jobs_failed(), 20u);
}

// A caller that looks at all jobs waits for a busy one without the table's lock.
TEST_F(JobTableTest, ABusyJobDelaysNoOtherUser) {
  Gate busy, release;
  const auto sink = std::make_shared<RecordingSink>([&](const SessionMessage&) {
    busy.Open();  // the job's lock is held
    release.Wait();
  });
  const auto job = table_.Join(Key(1), 0, 1, {}, /*incarnation=*/1, sink);
  ASSERT_TRUE(job.ok()) << job.status();
  std::thread ends([&] { (*job)->Lose({0, 1}, absl::AbortedError("it has ended")); });
  busy.Wait();
  EXPECT_TRUE(Join(0, 2, Key(2)).job.ok());  // not reached if it waits
  std::thread ticks([&] { table_.Tick(); });
  EXPECT_TRUE(Join(0, 2, Key(3)).job.ok());
  release.Open();
  ends.join();
  ticks.join();
  table_.Tick();
  EXPECT_EQ(table_.Jobs().size(), 3u);
}

// Another node's daemon can name a different user each time, and no user is over its quota.
TEST_F(JobTableTest, RetiredJobsOfManyUsersKeepLittleMemory) {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  ArenaQuota memory(1024 * kMiB);
  ImmediateExecutor executor;
  JobEnvironment environment = Environment();
  environment.memory = &memory;
  environment.executor = &executor;
  JobTable table(environment, kQuota);
  for (std::uint32_t user = 1000; user < 1020; ++user) {
    const auto job = table.Join(Key(user), 0, /*world_size=*/65536, {}, /*incarnation=*/1,
                                std::make_shared<RecordingSink>());
    ASSERT_TRUE(job.ok()) << job.status();
    (*job)->Lose({0, 1}, absl::AbortedError("it has ended"));
    table.Tick();
  }
  EXPECT_LE(memory.total_bytes(), 128 * kMiB);
  EXPECT_FALSE(table.Jobs().empty()) << "status shows the last ones";
}

// It waits for the table, or finds the job retired.
TEST_F(JobTableTest, ARankThatJoinsWhileAJobRetiresHasItsMemory) {
  ArenaQuota memory(std::uint64_t{64} << 20);
  ImmediateExecutor executor;
  JobEnvironment environment = Environment();
  environment.memory = &memory;
  environment.executor = &executor;
  JobTable table(environment, kQuota);
  LayoutRequest request;
  request.spec.name = "model";
  request.spec.explicit_buckets.assign(1000, {DataType::kFloat32, 4});
  const auto job =
      table.Join(Key(), 0, 1, {}, /*incarnation=*/1, std::make_shared<RecordingSink>());
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_TRUE((*job)->RegisterLayout({0, 1}, request).ok());
  const Tenant user(1000);
  const auto others = memory.Reserve(user, memory.bytes_per_user() - memory.bytes_of(user));
  ASSERT_TRUE(others.ok()) << others.status();
  (*job)->Lose({0, 1}, absl::AbortedError("it has ended"));

  std::thread next;
  std::atomic<pid_t> joins{0};
  std::atomic<bool> returned{false};
  absl::Status joined;
  executor.Before([&] {
    next = std::thread([&] {
      joins = ThisThread();
      const auto sink = std::make_shared<RecordingSink>();
      joined = table.Join(Key(1000, "next"), 0, 1, {}, /*incarnation=*/2, sink).status();
      returned = true;
    });
    while (joins == 0) std::this_thread::yield();
    AwaitSleep(joins, &returned);
  });
  table.Tick();
  ASSERT_TRUE(next.joinable()) << "nothing was given back";
  next.join();
  EXPECT_TRUE(joined.ok()) << joined;
}

TEST_F(JobTableTest, ARankThatIsRefusedLeavesTheGenerationThatItWouldReplace) {
  const Session mine = Join(0, 1);
  for (std::size_t i = 1; i < kQuota; ++i) {
    ASSERT_TRUE(Join(0, 2, Key(1000, absl::StrCat("run", i))).job.ok());
  }
  // In another pod the job's next generation is charged to another tenant, which has no place left.
  for (std::size_t i = 0; i < kQuota; ++i) {
    ASSERT_TRUE(Join(0, 2, Key(1000, "other", absl::StrCat("token", i)), {}, kPodA).job.ok());
  }
  ExpectSaid(Join(0, 1, Key(), {}, kPodA).job.status(), absl::StatusCode::kResourceExhausted,
             "QUOTA", {"3 jobs"});
  EXPECT_FALSE(mine.Ended());
  EXPECT_EQ(GenerationOf(Join(0, 1)), 2u);
  EXPECT_TRUE(mine.Ended());
}

TEST_F(JobTableTest, DrainEndsEverySessionWithItsReason) {
  const Session a = Join(0);
  const Session b = Join(0, 1, Key(1001));
  table_.EndAll(Draining());
  for (const Session* session : {&a, &b}) {
    ASSERT_TRUE(session->Ended());
    EXPECT_EQ(session->end().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(DetailsOf(session->end()).reason, "DRAINING");
  }
}

}  // namespace
}  // namespace gradsync::daemon
