// Ranks whose process comes to a good end without leaving the job.

#include <gtest/gtest.h>

#include <string>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class FinishTest : public JobFixture {
 protected:
  void SetUp() override {
    Start(3);
    channel_ = Agree(Spec(2));
  }

  void Finish(std::uint32_t rank) {
    const absl::Status status = job_->Finish(Of(rank));
    EXPECT_TRUE(status.ok()) << status;
  }
  // Every session that is left ends because of rank 1.
  void ExpectEnded(const std::string& begun) {
    for (const std::uint32_t rank : {0, 2}) {
      const absl::Status end = Only<SessionEndMessage>(rank).status;
      EXPECT_EQ(end.code(), absl::StatusCode::kAborted);
      EXPECT_EQ(ReasonOf(end), "RANK_FINISHED");
      EXPECT_EQ(FieldOf(end, "rank"), "1");
      EXPECT_TRUE(Says(end, "rank 1 of job 'run-7' finished")) << end;
      EXPECT_TRUE(Says(end, begun)) << end;
    }
    EXPECT_TRUE(job_->HasEnded());
    EXPECT_TRUE(job_->Empty());
  }

  std::uint32_t channel_ = 0;
};

TEST_F(FinishTest, JobOfRanksThatAllFinishEndsWell) {
  for (const std::uint32_t rank : {1, 0, 2}) {
    Finish(rank);
    EXPECT_TRUE(Only<SessionEndMessage>(rank).status.ok());
  }
  EXPECT_FALSE(job_->HasEnded());
  EXPECT_TRUE(job_->Empty());
}

TEST_F(FinishTest, RankMayLeaveAfterAnotherHasFinished) {
  Finish(1);
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  EXPECT_TRUE(Only<SessionEndMessage>(2).status.ok());
}

TEST_F(FinishTest, NextStepEndsTheJobAndSaysWhenTheRankFinished) {
  for (const std::uint32_t rank : {0, 1, 2}) DoStep(rank, channel_, 1);
  reducer_.CompleteAll();
  Finish(1);
  clock_.Advance(12'300'000'000);
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty());
  TakeAll();
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 2, {1}).ok());
  ExpectEnded("finished 12s ago");
}

TEST_F(FinishTest, StepThatAnotherRankHasBegunEndsTheJob) {
  ASSERT_TRUE(job_->MarkReady(Of(2), channel_, 1, {0}).ok());
  Finish(1);
  ExpectEnded("Rank 2 has begun step 1 of layout 'model'");
}

TEST_F(FinishTest, OperationEndsTheJob) {
  Finish(1);
  ASSERT_TRUE(job_->Operate(Of(2), 1, OperationSpec(), {}, kForever).ok());
  ExpectEnded("Rank 2 has begun operation 1,");
}

TEST_F(FinishTest, LayoutEndsTheJob) {
  Finish(1);
  ASSERT_TRUE(job_->RegisterLayout(Of(0), Request(Spec(1, "other"))).ok());
  ExpectEnded("Rank 0 has begun layout 'other'");
}

TEST_F(FinishTest, CollectiveThatTheRankHasNotBegunEndsTheJob) {
  for (const std::uint32_t rank : {0, 1}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  Finish(1);
  ASSERT_TRUE(job_->BeginCollective(Of(2), "barrier").ok());
  EXPECT_FALSE(job_->HasEnded()) << "rank 1 has begun it, too";
  ASSERT_TRUE(job_->BeginCollective(Of(2), "gather").ok());
  ExpectEnded("Rank 2 has begun collective 2 (gather), which needs it");
}

TEST_F(FinishTest, CollectiveThatAnotherRankHasBegunEndsTheJob) {
  ASSERT_TRUE(job_->BeginCollective(Of(0), "barrier").ok());
  Finish(1);
  ExpectEnded("Rank 0 has begun collective 1 (barrier), which needs it");
}

TEST_F(FinishTest, RankThatHasBegunTheFewestCollectivesIsNamed) {
  for (const std::uint32_t rank : {0, 2}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  Finish(2);
  EXPECT_FALSE(job_->HasEnded());
  Finish(1);
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANK_FINISHED");
  EXPECT_EQ(FieldOf(end, "rank"), "1");
}

TEST_F(FinishTest, FirstFinishedRankThatIsBehindIsNamed) {
  for (const std::uint32_t rank : {0, 2}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  Finish(2);
  ASSERT_TRUE(job_->BeginCollective(Of(1), "barrier").ok());
  Finish(1);
  EXPECT_FALSE(job_->HasEnded()) << "all three have begun the same";
  ASSERT_TRUE(job_->BeginCollective(Of(0), "gather").ok());
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(FieldOf(end, "rank"), "1");
  EXPECT_TRUE(Says(end, "Rank 0 has begun collective 2 (gather)")) << end;
}

TEST_F(FinishTest, RanksThatStayedResumeAndThenEndTheJob) {
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/false).ok());
  Finish(1);
  Only<LeaveDoneMessage>(0);
  TakeAll();
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {0}).ok());
  ExpectEnded("Rank 0 has begun step 1");
}

TEST_F(FinishTest, RankInAStepMayNotFinish) {
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0}).ok());
  const absl::Status status = job_->Finish(Of(1));
  EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(status, "rank 1 sent Finish in the middle of a step")) << status;
}

TEST_F(FinishTest, RankThatStaysMayNotFinish) {
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/false).ok());
  const absl::Status status = job_->Finish(Of(1));
  EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(status, "rank 1 sent Finish while it stays")) << status;
}

TEST_F(FinishTest, LossIsStillALoss) {
  Finish(1);
  Lose(2);
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "RANK_LOST");
}

using HugeFinishTest = JobFixture;

// If each tick compared every rank with every other one, that would be 4e11 looks.
TEST_F(HugeFinishTest, TicksOfAHugeJobWithAFinishedRankAreShort) {
  constexpr std::uint32_t kRanks = 65'536, kFinished = 2, kLast = kRanks - 1;
  Start(kRanks);
  for (const std::uint32_t rank : {kFinished, kLast}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  ASSERT_TRUE(job_->Finish(Of(kFinished)).ok());
  for (int tick = 0; tick < 100; ++tick) job_->Tick();
  EXPECT_FALSE(job_->HasEnded());
  ASSERT_TRUE(job_->BeginCollective(Of(kLast), "gather").ok());
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANK_FINISHED");
  EXPECT_EQ(FieldOf(end, "rank"), "2");
  EXPECT_TRUE(Says(end, "Rank 65535 has begun collective 2 (gather)")) << end;
}

}  // namespace
}  // namespace gradsync::daemon
