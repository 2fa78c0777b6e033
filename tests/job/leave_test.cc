// Ranks that leave and take part again in the next epoch.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/gradsync/limits.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class LeaveTest : public JobFixture {
 protected:
  void SetUp() override {
    Start(3);
    channel_ = Agree(Spec(2));
  }

  void Stay(std::uint32_t rank) {
    const absl::Status left = job_->Leave(Of(rank), /*exit=*/false);
    EXPECT_TRUE(left.ok()) << left;
  }
  void Exit(std::uint32_t rank) {
    const absl::Status left = job_->Leave(Of(rank), /*exit=*/true);
    EXPECT_TRUE(left.ok()) << left;
  }
  // All ranks stay, one after the other, after a step of ranks 1 and 2. They have a layout of 40
  // buckets, whose words the executor then writes. Returns its channel.
  std::uint32_t StayWithManyWords() {
    const std::uint32_t large = Agree(Spec(40, "large"));
    Stay(0);
    for (const std::uint32_t rank : {1, 2}) DoStep(rank, large, 1);
    reducer_.CompleteAll();
    Stay(1);
    executor_.RunAll();
    TakeAll();
    Stay(2);
    return large;
  }
  // Runs a whole step of these ranks.
  void Step(const std::vector<std::uint32_t>& ranks, std::uint64_t step) {
    for (const std::uint32_t rank : ranks) DoStep(rank, channel_, step);
    reducer_.CompleteAll();
    for (const std::uint32_t rank : ranks) {
      const auto done = Only<StepDoneMessage>(rank);
      EXPECT_TRUE(done.record->verdict.ok());
      EXPECT_EQ(done.record->times.step, step);
      EXPECT_EQ(done.record->live_ranks, ranks.size());
    }
  }
  absl::Status Barrier(std::uint32_t rank, std::uint64_t sequence) {
    return job_->Operate(Of(rank), sequence, OperationSpec(), {}, kForever);
  }
  void ExpectLeaveDone(const std::vector<std::uint32_t>& ranks, std::uint32_t last,
                       std::uint64_t sequence, std::uint64_t step) {
    for (const std::uint32_t rank : ranks) {
      const auto done = Only<LeaveDoneMessage>(rank);
      EXPECT_EQ(done.last_to_leave, last);
      EXPECT_EQ(done.next_sequence, sequence);
      ASSERT_EQ(done.next_steps.size(), 1u);
      EXPECT_EQ(done.next_steps[0].channel, channel_);
      EXPECT_EQ(done.next_steps[0].step, step);
    }
  }

  std::uint32_t channel_ = 0;
};

TEST_F(LeaveTest, DifferentRanksRunOutFirstInEachEpoch) {
  std::uint64_t step = 1;
  std::uint64_t sequence = 1;
  for (std::uint32_t epoch = 0; epoch < 20; ++epoch) {
    const std::uint32_t first = epoch % 3, second = (epoch + 1) % 3, last = (epoch + 2) % 3;
    Step({0, 1, 2}, step++);
    TakeAll();
    Stay(first);
    Step({second, last}, step++);
    TakeAll();
    ASSERT_TRUE(Barrier(second, sequence).ok());
    ASSERT_TRUE(Barrier(last, sequence).ok());
    Only<OperationDoneMessage>(last);
    ++sequence;
    Stay(second);
    // Ranks that are away get no messages about this step.
    Step({last}, step++);
    for (const std::uint32_t rank : {first, second}) {
      EXPECT_TRUE(sink(rank).Of<StepDoneMessage>().empty());
    }
    Stay(last);
    ExpectLeaveDone({0, 1, 2}, last, sequence, step);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(memory(rank, channel_).done(1), step - 1);
    }
    TakeAll();
    for (const std::uint32_t rank : {2, 1, 0}) ASSERT_TRUE(Barrier(rank, sequence).ok());
    Only<OperationDoneMessage>(first);
    ++sequence;
    TakeAll();
  }
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.steps_complete, 60u);
}

// Their memory may be swapped out, and the thread of the last Leave holds the job's lock.
TEST_F(LeaveTest, TheExecutorWritesManyWordsBeforeAnyRankMayGoOn) {
  const std::uint32_t large = StayWithManyWords();
  EXPECT_EQ(memory(0, large).done(39), 0u);
  EXPECT_EQ(executor_.pending(), 3u) << "the words of three ranks";
  executor_.RunNext();
  executor_.RunNext();
  for (const std::uint32_t rank : {0, 1, 2}) {
    EXPECT_TRUE(sink(rank).Of<LeaveDoneMessage>().empty());
  }
  executor_.RunNext();
  EXPECT_EQ(executor_.pending(), 3u) << "each rank's message has a turn of its own";
  for (const std::uint32_t rank : {0, 1, 2}) EXPECT_FALSE(sink(rank).AllFlushed());
  executor_.RunAll();
  for (const std::uint32_t rank : {0, 1, 2}) EXPECT_TRUE(sink(rank).AllFlushed());
  EXPECT_EQ(memory(0, large).done(39), 1u);
  for (const std::uint32_t rank : {0, 1, 2})
    EXPECT_EQ(Only<LeaveDoneMessage>(rank).last_to_leave, 2u);
  for (const std::uint32_t rank : {0, 1, 2}) DoStep(rank, large, 2);
  reducer_.CompleteAll();
  executor_.RunAll();
  EXPECT_EQ(memory(0, large).done(39), 2u);
}

TEST_F(LeaveTest, LossWhileWordsAreWrittenEndsTheJobAfterThem) {
  StayWithManyWords();
  job_->Lose(Of(1), absl::AbortedError("its process has ended"));
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty()) << "words are written to its memory";
  EXPECT_FALSE(job_->Empty());
  executor_.RunAll();
  EXPECT_FALSE(sink(0).Of<SessionEndMessage>().empty());
  EXPECT_TRUE(sink(0).Of<LeaveDoneMessage>().empty());
}

TEST_F(LeaveTest, LossUnderHoldWhileWordsAreWrittenEndsTheJobAfterThem) {
  sinks_.clear();
  memory_.clear();
  options_.on_rank_loss = OnRankLoss::kHold;
  options_.hold_timeout_ns = kStepTimeoutNs;
  Start(3);
  const std::uint32_t large = Agree(Spec(40, "large"));
  for (const std::uint32_t rank : {0, 1, 2}) DoStep(rank, large, 1);
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0, 1, 2}) Stay(rank);
  TakeAll();
  Lose(1);
  EXPECT_FALSE(job_->IsHeld(1));
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty()) << "words are written to its memory";
  executor_.RunAll();
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANK_LOST");
  EXPECT_TRUE(Says(end, "It could not be held, because some rank waits in LeaveAndStay")) << end;
  EXPECT_TRUE(sink(0).Of<LeaveDoneMessage>().empty());
}

TEST_F(LeaveTest, RanksMayExitWhileWordsAreWritten) {
  StayWithManyWords();
  Exit(0);
  executor_.RunAll();
  EXPECT_TRUE(sink(0).Of<LeaveDoneMessage>().empty());
  for (const std::uint32_t rank : {1, 2}) EXPECT_EQ(Only<LeaveDoneMessage>(rank).last_to_leave, 2u);
}

TEST_F(LeaveTest, JobThatAllRanksLeaveWhileWordsAreWrittenDoesNotFail) {
  const std::uint32_t large = Agree(Spec(40, "large"));
  for (const std::uint32_t rank : {0, 1, 2}) DoStep(rank, large, 1);
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0, 1, 2}) Stay(rank);
  TakeAll();
  for (const std::uint32_t rank : {0, 1, 2}) Exit(rank);
  EXPECT_FALSE(job_->EndIfIdle(absl::UnavailableError("drains"))) << "words are written";
  job_->End(absl::AbortedError("superseded"));
  executor_.RunAll();
  for (const std::uint32_t rank : {0, 1, 2}) {
    EXPECT_TRUE(Only<SessionEndMessage>(rank).status.ok());
    EXPECT_TRUE(sink(rank).Of<LeaveDoneMessage>().empty());
  }
  EXPECT_TRUE(job_->EndIfIdle(absl::UnavailableError("drains")));
  EXPECT_TRUE(job_->Empty());
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(LeaveTest, LeaveDoneNamesNoLayoutThatNobodyHas) {
  for (const std::uint32_t rank : {0, 1}) {
    ASSERT_TRUE(job_->ReleaseLayout(Of(rank), channel_).ok());
    Stay(rank);
  }
  Exit(2);
  for (const std::uint32_t rank : {0, 1}) {
    EXPECT_TRUE(Only<LeaveDoneMessage>(rank).next_steps.empty());
  }
}

TEST_F(LeaveTest, LastToLeaveIsTheLastRankThatStayed) {
  Stay(1);
  Stay(0);
  Exit(2);
  ExpectLeaveDone({0, 1}, 0, 1, 1);
  TakeAll();
  Step({0, 1}, 1);
  TakeAll();
  // A rank that stayed may exit instead of waiting for the others.
  Stay(0);
  Exit(0);
  EXPECT_TRUE(sink(1).messages().empty());
  Stay(1);
  ExpectLeaveDone({1}, 1, 1, 2);
}

TEST_F(LeaveTest, NoMessageIsSentWhenAllRanksExit) {
  for (const std::uint32_t rank : {0, 1, 2}) Exit(rank);
  EXPECT_TRUE(sink(0).Of<LeaveDoneMessage>().empty());
  EXPECT_TRUE(job_->Empty());
}

TEST_F(LeaveTest, RankThatHasLeftCannotTakePart) {
  ASSERT_TRUE(Barrier(0, 1).ok());
  Stay(1);
  OperationSpec broadcast;
  broadcast.kind = OperationKind::kBroadcast;
  for (const absl::Status& status :
       {job_->MarkReady(Of(1), channel_, 1, {0}), job_->EndStep(Of(1), channel_, 1, ""),
        job_->AbandonStep(Of(1), channel_, 1, ""), Barrier(1, 1),
        job_->ChunkWritten(Of(1), 1, 0, 1), job_->ChunkRead(Of(1), 1, 0),
        job_->Operate(Of(1), 1, broadcast, {}, kForever), job_->CheckReplaces(Of(1), channel_),
        job_->Leave(Of(1), /*exit=*/false)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
    EXPECT_EQ(FieldOf(status, "rank"), "1");
  }
  // The other ranks' operation is not disturbed.
  ASSERT_TRUE(Barrier(2, 1).ok());
  Only<OperationDoneMessage>(0);
}

TEST_F(LeaveTest, StepsCanBeVoidedOrTimeOutWhileARankIsAway) {
  Stay(1);
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {0}).ok());
  ASSERT_TRUE(job_->AbandonStep(Of(2), channel_, 1, "no memory").ok());
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_ABANDONED");
  TakeAll();
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  clock_.Advance(kStepTimeoutNs);
  job_->Tick();
  const absl::Status late = Only<StepDoneMessage>(2).record->verdict;
  EXPECT_EQ(ReasonOf(late), "STEP_TIMEOUT");
  EXPECT_FALSE(Says(late, "rank 1")) << late;
  EXPECT_TRUE(sink(1).messages().empty());
  Stay(0);
  Stay(2);
  ExpectLeaveDone({0, 1, 2}, 2, 1, 3);
  // LeaveDone named step 3: a message about an older step cannot be in flight.
  EXPECT_EQ(ReasonOf(job_->MarkReady(Of(1), channel_, 2, {0})), "STALE_STEP");
}

TEST_F(LeaveTest, LossOfARankThatIsAwayEndsTheJob) {
  Stay(1);
  Lose(1);
  const absl::Status status = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(status), "RANK_LOST");
  EXPECT_TRUE(Says(status, "after it had left")) << status;
}

TEST_F(LeaveTest, ReplacementInProgressFailsAndTheOldLayoutContinues) {
  const std::uint32_t next = Register(0, Spec(4), channel_);
  ASSERT_TRUE(Map(0, next).ok());
  Stay(1);
  EXPECT_EQ(ReasonOf(Only<LayoutFailedMessage>(0).status), "RANKS_LEFT");
  Step({0, 2}, 1);
  LayoutRequest again = Request(Spec(4));
  again.replaces = channel_;
  EXPECT_EQ(ReasonOf(job_->RegisterLayout(Of(2), again).status()), "RANKS_LEFT");
}

TEST_F(LeaveTest, LowestLiveRankSkipsRanksThatLeft) {
  OperationSpec spec;
  spec.kind = OperationKind::kBroadcast;
  spec.root = kRootIsLowestLive;
  spec.bytes = 4;
  char window[3][4] = {"...", "one", "two"};
  const auto operate = [&](std::uint32_t rank, std::uint64_t sequence) {
    return job_->Operate(Of(rank), sequence, spec,
                         {nullptr, reinterpret_cast<std::byte*>(window[rank]), 4}, kForever);
  };
  ASSERT_TRUE(operate(2, 1).ok());
  ASSERT_TRUE(operate(1, 1).ok());
  EXPECT_TRUE(sink(1).messages().empty());  // rank 0 may still come
  Stay(0);
  const auto write = Only<ChunkReadyMessage>(1);
  EXPECT_TRUE(write.write);
  EXPECT_TRUE(sink(2).messages().empty());
  EXPECT_EQ(ReasonOf(job_->ChunkRead(Of(1), 1, 0)), "PROTOCOL_VIOLATION");
  ASSERT_TRUE(job_->ChunkWritten(Of(1), 1, 0, 4).ok());
  executor_.RunAll();
  EXPECT_FALSE(Only<ChunkReadyMessage>(2).write);
  ASSERT_TRUE(job_->ChunkRead(Of(2), 1, 0).ok());
  Only<OperationDoneMessage>(1);
  EXPECT_STREQ(window[2], "one");
  EXPECT_STREQ(window[0], "...");
  // When all ranks take part again, the root is rank 0.
  Stay(1);
  Stay(2);
  TakeAll();
  for (const std::uint32_t rank : {0, 1, 2}) ASSERT_TRUE(operate(rank, 2).ok());
  EXPECT_TRUE(Only<ChunkReadyMessage>(0).write);
}

TEST_F(LeaveTest, NamedRootAndLowestLiveRankAreAMismatch) {
  OperationSpec spec;
  spec.kind = OperationKind::kBroadcast;
  spec.bytes = 4;
  ASSERT_TRUE(job_->Operate(Of(0), 1, spec, {}, kForever).ok());
  spec.root = kRootIsLowestLive;
  ASSERT_TRUE(job_->Operate(Of(1), 1, spec, {}, kForever).ok());
  const absl::Status status = Only<OperationFailedMessage>(0).status;
  EXPECT_EQ(ReasonOf(status), "OPERATION_MISMATCH");
  EXPECT_TRUE(Says(status, "from the lowest live rank")) << status;
}

}  // namespace
}  // namespace gradsync::daemon
