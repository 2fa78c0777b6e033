// Deadlines of steps and operations. layout_agreement_test covers those of layouts.

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class DeadlineTest : public JobFixture {
 protected:
  void Wait(std::uint64_t ns) {
    clock_.Advance(ns);
    job_->Tick();
  }
  StagingMemory Staging(std::uint32_t rank) {
    staging_.resize(sinks_.size());
    staging_[rank] = std::make_shared<std::vector<std::byte>>(64);
    return {staging_[rank], staging_[rank]->data(), staging_[rank]->size()};
  }
  absl::Status Operate(std::uint32_t rank, const OperationSpec& spec, std::uint64_t deadline_ns) {
    return job_->Operate(Of(rank), 1, spec, Staging(rank), deadline_ns);
  }

  std::vector<std::shared_ptr<std::vector<std::byte>>> staging_;
};

TEST_F(DeadlineTest, StepDeadlineRunsFromTheFirstMark) {
  Start(2);
  const std::uint32_t channel = Agree(Spec(2));
  Wait(10 * kStepTimeoutNs);
  EXPECT_TRUE(sink(0).messages().empty());
  ASSERT_TRUE(job_->MarkReady(Of(0), channel, 1, {0}).ok());
  Wait(kStepTimeoutNs - 1);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel, 1, {1}).ok());
  EXPECT_TRUE(sink(0).messages().empty());
  Wait(1);
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_TIMEOUT");
}

TEST_F(DeadlineTest, StepTimeoutNamesWhatIsMissingToEveryRank) {
  Start(3);
  const std::uint32_t channel = Agree(Spec(3));
  DoStep(0, channel, 1);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel, 1, {0, 1, 2}).ok());
  ASSERT_TRUE(job_->MarkReady(Of(2), channel, 1, {1}).ok());
  reducer_.CompleteAll();
  Wait(kStepTimeoutNs);
  const auto record = Only<StepDoneMessage>(0).record;
  const absl::Status& status = record->verdict;
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Says(status, "'model', step 1")) << status;
  EXPECT_TRUE(Says(status, "rank 1 has not ended the step")) << status;
  EXPECT_TRUE(Says(status, "rank 2 has not marked bucket 0, 2 ready")) << status;
  EXPECT_FALSE(Says(status, "rank 0")) << status;
  EXPECT_EQ(FieldOf(status, "step"), "1");
  EXPECT_EQ(FieldOf(status, "channel"), std::to_string(channel));
  EXPECT_EQ(Only<StepDoneMessage>(1).record, record);
  EXPECT_EQ(Only<StepDoneMessage>(2).record, record);
}

TEST_F(DeadlineTest, VoidStepWaitsForRunningReductions) {
  Start(2);
  const std::uint32_t channel = Agree(Spec(2));
  DoStep(0, channel, 1);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel, 1, {0}).ok());
  Wait(kStepTimeoutNs);
  EXPECT_TRUE(sink(0).messages().empty());
  // Late messages do not save the step, and start no reduction.
  ASSERT_TRUE(job_->MarkReady(Of(1), channel, 1, {1}).ok());
  EXPECT_EQ(reducer_.held().size(), 1u);
  ASSERT_TRUE(job_->EndStep(Of(1), channel, 1, "").ok());
  reducer_.CompleteAll();
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_TIMEOUT");
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.steps_void, 1u);
}

TEST_F(DeadlineTest, StepTimeoutNamesNoRankIfOnlyTheDaemonIsLate) {
  Start(2);
  const std::uint32_t channel = Agree(Spec(2));
  DoStep(0, channel, 1);
  DoStep(1, channel, 1);
  Wait(kStepTimeoutNs);
  reducer_.CompleteAll();
  const absl::Status status = Only<StepDoneMessage>(0).record->verdict;
  EXPECT_EQ(ReasonOf(status), "STEP_TIMEOUT");
  EXPECT_TRUE(Says(status, "a reduction is running")) << status;
  EXPECT_FALSE(Says(status, "rank 1")) << status;
  EXPECT_EQ(FieldOf(status, "rank"), "");
  EXPECT_EQ(FieldOf(status, "bucket"), "");
}

TEST_F(DeadlineTest, EachStepHasItsOwnDeadline) {
  Start(1);
  const std::uint32_t channel = Agree(Spec(2));
  ASSERT_TRUE(job_->MarkReady(Of(0), channel, 1, {0}).ok());
  reducer_.CompleteAll();
  Wait(kStepTimeoutNs);
  Only<StepDoneMessage>(0);
  TakeAll();
  Wait(10 * kStepTimeoutNs);
  EXPECT_TRUE(sink(0).messages().empty());
  ASSERT_TRUE(job_->MarkReady(Of(0), channel, 2, {0, 1}).ok());
  reducer_.CompleteAll();
  Wait(kStepTimeoutNs - 1);
  ASSERT_TRUE(job_->EndStep(Of(0), channel, 2, "").ok());
  EXPECT_TRUE(Only<StepDoneMessage>(0).record->verdict.ok());
}

TEST_F(DeadlineTest, OperationTimeoutNamesTheOperationAndMissingRanks) {
  Start(4);
  const OperationSpec barrier;
  const std::uint64_t deadline_ns = clock_.NowNs() + 100;
  ASSERT_TRUE(Operate(0, barrier, deadline_ns).ok());
  ASSERT_TRUE(Operate(2, barrier, deadline_ns + 1000).ok());
  Wait(99);
  EXPECT_TRUE(sink(0).messages().empty());
  Wait(1);
  for (const std::uint32_t rank : {0, 2}) {
    const auto failed = Only<OperationFailedMessage>(rank);
    EXPECT_EQ(failed.sequence, 1u);
    EXPECT_EQ(failed.status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ReasonOf(failed.status), "OPERATION_TIMEOUT");
    EXPECT_TRUE(Says(failed.status, "operation 1 (barrier)")) << failed.status;
    EXPECT_TRUE(Says(failed.status, "waited for rank 1, 3.")) << failed.status;
  }
  EXPECT_TRUE(sink(1).messages().empty());
  // A rank that comes late reads which of the ranks it is.
  ASSERT_TRUE(Operate(3, barrier, deadline_ns).ok());
  const absl::Status late = Only<OperationFailedMessage>(3).status;
  EXPECT_TRUE(Says(late, "waited for rank 1, 3 (this rank).")) << late;
}

// Every rank gets the error, and it is kept for those that come late.
TEST_F(DeadlineTest, OperationTimeoutOfAHugeJobIsShort) {
  Start(300);
  ASSERT_TRUE(Operate(299, {}, clock_.NowNs() + 100).ok());
  Wait(100);
  const absl::Status failed = Only<OperationFailedMessage>(299).status;
  EXPECT_TRUE(Says(failed, "waited for rank 0, 1, 2, 3, 4, 5, 6, 7, 291 more.")) << failed;
  EXPECT_EQ(FieldOf(failed, "rank"), "0");
  ASSERT_TRUE(Operate(7, {}, kForever).ok());
  const absl::Status late = Only<OperationFailedMessage>(7).status;
  EXPECT_TRUE(Says(late, "6, 7 (this rank), 291 more.")) << late;
}

TEST_F(DeadlineTest, EarliestDeadlineOfAnyRankCounts) {
  Start(3);
  const std::uint64_t now_ns = clock_.NowNs();
  ASSERT_TRUE(Operate(0, {}, now_ns + 1000).ok());
  ASSERT_TRUE(Operate(1, {}, now_ns + 10).ok());
  Wait(10);
  Only<OperationFailedMessage>(0);
}

TEST_F(DeadlineTest, BroadcastTimeoutNamesTheMissingRootOrReaders) {
  Start(3);
  OperationSpec broadcast;
  broadcast.kind = OperationKind::kBroadcast;
  broadcast.root = 1;
  broadcast.bytes = 100;
  for (const bool written : {false, true}) {
    const std::uint64_t sequence = written ? 2 : 1;
    const std::uint64_t deadline_ns = clock_.NowNs() + 10;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(job_->Operate(Of(rank), sequence, broadcast, Staging(rank), deadline_ns).ok());
    }
    if (written) {
      ASSERT_TRUE(job_->ChunkWritten(Of(1), sequence, 0, 64).ok());
      executor_.RunAll();
      ASSERT_TRUE(job_->ChunkRead(Of(2), sequence, 0).ok());
    }
    Wait(10);
    const absl::Status status = Only<OperationFailedMessage>(0).status;
    const std::string reader = written ? " (this rank)." : ".";
    EXPECT_TRUE(Says(status, absl::StrCat("waited for rank ", written ? 0 : 1, reader))) << status;
    TakeAll();
  }
}

TEST_F(DeadlineTest, OperationTimeoutWaitsForTheRunningReduction) {
  Start(2);
  OperationSpec reduce;
  reduce.kind = OperationKind::kAllReduce;
  reduce.dtype = DataType::kFloat32;
  reduce.count = 4;
  const std::uint64_t deadline_ns = clock_.NowNs() + 10;
  ASSERT_TRUE(Operate(0, reduce, deadline_ns).ok());
  ASSERT_TRUE(Operate(1, reduce, deadline_ns).ok());
  Wait(10);
  EXPECT_TRUE(sink(0).messages().empty());
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0, 1}) {
    const absl::Status status = Only<OperationFailedMessage>(rank).status;
    EXPECT_EQ(ReasonOf(status), "OPERATION_TIMEOUT");
    EXPECT_TRUE(Says(status, "its reduction or copy is still running")) << status;
  }
}

}  // namespace
}  // namespace gradsync::daemon
