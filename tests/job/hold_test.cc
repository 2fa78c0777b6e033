// Policy `hold`: a rank is lost, the running step waits, and another session takes its place.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/gradsync/limits.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kHoldTimeoutNs = 50'000'000;

class HoldTest : public JobFixture {
 protected:
  HoldTest() {
    options_.on_rank_loss = OnRankLoss::kHold;
    options_.hold_timeout_ns = kHoldTimeoutNs;
  }

  // A job of `ranks` ranks that has completed step 1 of a layout of two buckets.
  void Begin(std::uint32_t ranks) {
    Start(ranks);
    channel_ = Agree(Spec(2));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) DoStep(rank, channel_, 1);
    reducer_.CompleteAll();
    TakeAll();
  }
  // The rank's session joins after a loss, and maps new memory.
  void Return(std::uint32_t rank) {
    const absl::Status joined = Rejoin(rank);
    ASSERT_TRUE(joined.ok()) << joined;
    ASSERT_EQ(Register(rank, Spec(2)), channel_);
    const absl::Status mapped = Map(rank, channel_);
    ASSERT_TRUE(mapped.ok()) << mapped;
  }
  // Writes `value` into a bucket and marks it.
  void Mark(std::uint32_t rank, std::uint64_t step, std::uint32_t bucket, float value) {
    for (int i = 0; i < 4; ++i) At(rank, bucket)[i] = value;
    const absl::Status marked = job_->MarkReady(Of(rank), channel_, step, {bucket});
    EXPECT_TRUE(marked.ok()) << marked;
  }
  void End(std::uint32_t rank, std::uint64_t step) {
    const absl::Status ended = job_->EndStep(Of(rank), channel_, step, "");
    EXPECT_TRUE(ended.ok()) << ended;
  }
  // Carries out the copies, and what measures them.
  void Copy() {
    executor_.RunAll();
    reducer_.CompleteAll();
    executor_.RunAll();
  }
  float* At(std::uint32_t rank, std::uint32_t bucket) {
    return memory(rank, channel_).At<float>(offsets_[bucket]);
  }
  float Value(std::uint32_t rank, std::uint32_t bucket) { return At(rank, bucket)[0]; }
  std::uint64_t Done(std::uint32_t rank, std::uint32_t bucket) {
    return memory(rank, channel_).done(bucket);
  }
  // No rank that lives has got anything.
  void ExpectSilence(const std::vector<std::uint32_t>& ranks) {
    for (const std::uint32_t rank : ranks) {
      EXPECT_TRUE(sink(rank).messages().empty()) << "rank " << rank;
    }
  }
  void ExpectComplete(const std::vector<std::uint32_t>& ranks) {
    for (const std::uint32_t rank : ranks) {
      const auto done = Only<StepDoneMessage>(rank);
      ASSERT_NE(done.record, nullptr);
      const absl::Status verdict = done.record->verdict;
      EXPECT_TRUE(verdict.ok()) << "rank " << rank << ": " << verdict;
    }
    TakeAll();
  }

  const std::uint64_t offsets_[2] = {0, 128};
  std::uint32_t channel_ = 0;
};

TEST_F(HoldTest, StepWaitsAndCompletesWithTheNextSessionsGradients) {
  Begin(2);
  Mark(0, 2, 0, 1);
  Mark(0, 2, 1, 2);
  End(0, 2);
  Mark(1, 2, 0, 100);
  reducer_.CompleteAll();
  EXPECT_EQ(Value(0, 0), 50.5);
  Lose(1);
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(1).status), "PROCESS_ENDED");
  EXPECT_FALSE(job_->HasEnded());
  ExpectSilence({0});
  Return(1);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 2u);
  TakeAll();
  Mark(1, 2, 1, 4);
  reducer_.CompleteAll();
  EXPECT_EQ(Value(0, 1), 3);
  EXPECT_EQ(Value(1, 1), 3);
  Mark(1, 2, 0, 7);
  Copy();
  End(1, 2);
  ExpectComplete({0, 1});
  EXPECT_EQ(Value(1, 0), 50.5) << "the average, not its own gradients";
}

TEST_F(HoldTest, SnapshotNamesHeldAndHealingRanks) {
  Begin(3);
  Mark(0, 2, 0, 1);
  EXPECT_TRUE(job_->Snapshot().held_ranks.empty());
  Lose(1);
  EXPECT_EQ(job_->Snapshot().held_ranks, std::vector<std::uint32_t>{1});
  EXPECT_EQ(job_->Snapshot().phase, JobPhase::kRunning);
  Return(1);
  const JobSnapshot back = job_->Snapshot();
  EXPECT_TRUE(back.held_ranks.empty());
  ASSERT_EQ(back.ranks.size(), 3u);
  EXPECT_EQ(back.ranks[0].state, RankState::kLive);
  EXPECT_EQ(back.ranks[1].state, RankState::kHealing);
}

// Numbers of operations: those that went on without the rank count for it, too.
TEST_F(HoldTest, RankThatIsLiveAgainGetsItsNextOperation) {
  Begin(2);
  const OperationSpec barrier;
  EXPECT_TRUE(job_->Operate(Of(0), 1, barrier, {}, kForever).ok());
  EXPECT_TRUE(job_->Operate(Of(1), 1, barrier, {}, kForever).ok());
  Lose(1);
  EXPECT_TRUE(job_->Operate(Of(0), 2, barrier, {}, kForever).ok());
  Return(1);
  TakeAll();
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 2);
  reducer_.CompleteAll();
  EXPECT_EQ(Only<HealedMessage>(1).next_sequence, 3u);
  EXPECT_TRUE(sink(0).Of<HealedMessage>().empty());
  EXPECT_TRUE(job_->Operate(Of(1), 3, barrier, {}, kForever).ok());
}

TEST_F(HoldTest, ReducedBucketReachesTheNextSessionWhenItMarksIt) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) Mark(rank, 2, 0, 3 * rank);
  reducer_.CompleteAll();
  Lose(2);
  Return(2);
  for (int i = 0; i < 4; ++i) At(2, 0)[i] = 1000;
  executor_.RunAll();
  EXPECT_EQ(Value(2, 0), 1000) << "its backward pass may still write here";
  EXPECT_EQ(Done(2, 0), 0u);
  Mark(2, 2, 0, 1000);
  EXPECT_EQ(Done(2, 0), 0u);
  Copy();
  EXPECT_EQ(Value(2, 0), 3);
  EXPECT_EQ(Done(2, 0), 2u);
}

TEST_F(HoldTest, BucketInFlightFinishesAndReachesTheNextSession) {
  Begin(2);
  Mark(0, 2, 0, 1);
  Mark(1, 2, 0, 3);
  Lose(1);
  Return(1);
  Mark(1, 2, 0, 500);
  executor_.RunAll();
  EXPECT_EQ(Value(1, 0), 500) << "there is no average yet";
  reducer_.CompleteAll();
  EXPECT_EQ(Value(0, 0), 2);
  Copy();
  EXPECT_EQ(Value(1, 0), 2);
  EXPECT_EQ(Done(1, 0), 2u);
}

TEST_F(HoldTest, AverageThatATrainerHasChangedEndsTheJob) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) Mark(rank, 2, 0, 3);
  reducer_.CompleteAll();
  Lose(2);
  Return(2);
  TakeAll();
  At(0, 0)[3] = 2;  // clipped too early
  Mark(2, 2, 0, 3);
  Copy();
  EXPECT_EQ(Done(2, 0), 0u);
  const absl::Status end = Only<SessionEndMessage>(1).status;
  EXPECT_EQ(ReasonOf(end), "PROTOCOL_VIOLATION");
  EXPECT_EQ(FieldOf(end, "rank"), "0");
  EXPECT_EQ(FieldOf(end, "bucket"), "0");
  EXPECT_TRUE(Says(end, "has changed the bucket's average")) << end;
}

TEST_F(HoldTest, AverageIsCopiedFromALivingRankIfThereIsOne) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) Mark(rank, 2, 0, 3);
  reducer_.CompleteAll();
  Lose(0);
  Lose(1);
  At(0, 0)[0] = 100;  // its process was only stopped
  Return(1);
  Mark(1, 2, 0, 3);
  Copy();
  EXPECT_EQ(Value(1, 0), 3);
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(HoldTest, AverageThatIsNotFiniteIsCopied) {
  Begin(2);
  for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const std::uint32_t bucket = std::isnan(value) ? 0 : 1;
    Mark(0, 2, bucket, value);
    Mark(1, 2, bucket, 1);
    reducer_.CompleteAll();
  }
  Lose(1);
  Return(1);
  TakeAll();
  for (const std::uint32_t bucket : {0u, 1u}) Mark(1, 2, bucket, 1);
  Copy();
  for (const std::uint32_t rank : {0u, 1u}) End(rank, 2);
  ExpectComplete({0, 1});
  EXPECT_TRUE(std::isnan(Value(1, 0)));
  EXPECT_TRUE(std::isinf(Value(1, 1)));
}

TEST_F(HoldTest, StepOfALostRankThatHadEndedItCompletesWithItsGradients) {
  Begin(2);
  Mark(1, 2, 0, 10);
  Mark(1, 2, 1, 20);
  End(1, 2);
  Lose(1);
  Return(1);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 3u);
  TakeAll();
  Mark(0, 2, 0, 0);
  Mark(0, 2, 1, 0);
  reducer_.CompleteAll();
  End(0, 2);
  EXPECT_EQ(Value(0, 0), 5);
  EXPECT_EQ(Value(0, 1), 10);
  ExpectComplete({0});
  EXPECT_TRUE(sink(1).messages().empty()) << "step 2 is not its step";
  Mark(1, 3, 0, 30);
  Mark(0, 3, 0, 10);
  reducer_.CompleteAll();
  EXPECT_EQ(Value(1, 0), 20);
}

TEST_F(HoldTest, RankMayBeLostAgain) {
  Begin(2);
  Mark(0, 2, 0, 1);
  Mark(0, 2, 1, 1);
  End(0, 2);
  Mark(1, 2, 0, 3);
  reducer_.CompleteAll();
  for (int loss = 0; loss < 3; ++loss) {
    Lose(1);
    Return(1);
    Mark(1, 2, 0, 9);
    // Otherwise the average is still being copied, or measured.
    if (loss == 1) Copy();
    if (loss == 2) executor_.RunAll();
  }
  Copy();
  EXPECT_EQ(Value(1, 0), 2);
  EXPECT_EQ(Done(1, 0), 2u);
  TakeAll();
  Mark(1, 2, 1, 5);
  reducer_.CompleteAll();
  End(1, 2);
  ExpectComplete({0, 1});
  EXPECT_EQ(Value(0, 1), 3);
}

// The buckets that are being reduced have the gradients of the first lost session. The second one
// needs their averages until it is lost.
TEST_F(HoldTest, RankMayBeLostAgainAfterItHasEndedTheStep) {
  Begin(2);
  for (const std::uint32_t bucket : {0u, 1u}) {
    Mark(0, 2, bucket, 1);
    Mark(1, 2, bucket, 3);
  }
  End(0, 2);
  Lose(1);
  Return(1);
  for (const std::uint32_t bucket : {0u, 1u}) Mark(1, 2, bucket, 500);
  End(1, 2);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
  TakeAll();
  reducer_.CompleteAll();
  ExpectComplete({0});
  for (const std::uint32_t bucket : {0u, 1u}) EXPECT_EQ(Value(0, bucket), 2);
  Return(1);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 3u);
}

TEST_F(HoldTest, AverageIsNotCopiedToALostSessionWhoseGradientsAreNeeded) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Mark(rank, 2, 0, 1);
  Lose(1);
  Return(1);
  for (const std::uint32_t bucket : {0u, 1u}) Mark(1, 2, bucket, 5);
  End(1, 2);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  reducer_.CompleteAll();
  EXPECT_TRUE(lost->Shared()) << "bucket 1 waits, and needs its gradients";
  Copy();
  EXPECT_EQ(*lost->At<float>(offsets_[0]), 5);
  Mark(0, 2, 1, 1);
  End(0, 2);
  reducer_.CompleteAll();
  EXPECT_EQ(Value(0, 1), 3);
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
}

TEST_F(HoldTest, NextSessionGetsNoMessageAboutTheLostOnesAverage) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Mark(rank, 2, 0, 3);
  reducer_.CompleteAll();
  Lose(1);
  Return(1);
  Mark(1, 2, 0, 9);  // its average is being copied
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  LayoutRequest request = Request(Spec(2));
  request.bucket_done_messages = true;
  ASSERT_TRUE(job_->RegisterLayout(Of(1), std::move(request)).ok());
  memory_[channel_ - 1][1] = std::make_unique<TrainerMemory>(lost->bytes(), 2);
  ASSERT_TRUE(Map(1, channel_).ok());
  Copy();
  EXPECT_TRUE(sink(1).Of<BucketDoneMessage>().empty());
  Mark(1, 2, 0, 9);
  Copy();
  EXPECT_EQ(Only<BucketDoneMessage>(1).bucket, 0u);
  EXPECT_EQ(Value(1, 0), 3);
}

TEST_F(HoldTest, SeveralRanksAndRankZeroMayBeLostAtOnce) {
  Begin(4);
  for (const std::uint32_t rank : {0u, 1u, 2u, 3u}) Mark(rank, 2, 0, rank);
  for (const std::uint32_t rank : {0u, 2u}) {
    Lose(rank);
    EXPECT_FALSE(job_->HasEnded());
  }
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {2u, 0u}) Return(rank);
  TakeAll();
  for (const std::uint32_t rank : {0u, 2u}) Mark(rank, 2, 0, 77);
  for (const std::uint32_t rank : {0u, 1u, 2u, 3u}) Mark(rank, 2, 1, 1);
  reducer_.CompleteAll();
  Copy();
  for (const std::uint32_t rank : {0u, 1u, 2u, 3u}) End(rank, 2);
  for (const std::uint32_t rank : {0u, 1u, 2u, 3u}) EXPECT_EQ(Value(rank, 0), 1.5) << rank;
  ExpectComplete({0, 1, 2, 3});
}

TEST_F(HoldTest, LostMemoryStaysUntilTheStepIsDecided) {
  Begin(2);
  Mark(1, 2, 0, 1);
  Mark(1, 2, 1, 1);
  End(1, 2);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  EXPECT_TRUE(lost->Shared());
  Return(1);
  DoStep(0, channel_, 2);
  reducer_.CompleteAll();
  EXPECT_EQ(lost->done(0), 1u) << "the words of a lost session are not written";
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
}

TEST_F(HoldTest, MemoryOfSessionsThatDieAgainAndAgainIsReleased) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Mark(rank, 2, 0, 1);
  reducer_.CompleteAll();
  std::vector<std::unique_ptr<TrainerMemory>> lost;
  for (int death = 0; death < 4; ++death) {
    lost.push_back(std::move(memory_[channel_ - 1][1]));
    Lose(1);
    Return(1);
    Mark(1, 2, 0, 1);
    // Otherwise the session dies while the average is copied to it.
    if (death % 2 == 0) Copy();
  }
  Lose(1);
  Copy();
  for (int death = 0; death < 4; ++death) EXPECT_FALSE(lost[death]->Shared()) << death;
}

TEST_F(HoldTest, MemoryIsReleasedWhenItsBucketIsReduced) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Mark(rank, 2, 0, 1);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  EXPECT_TRUE(lost->Shared()) << "its bucket 0 is being reduced";
  reducer_.CompleteAll();
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
  Return(1);
  TakeAll();
  Mark(1, 2, 0, 9);
  Copy();
  for (const std::uint32_t rank : {0u, 1u}) {
    Mark(rank, 2, 1, 2);
    End(rank, 2);
  }
  reducer_.CompleteAll();
  ExpectComplete({0, 1});
  // The next step's reductions must not use the lost memory.
  for (const std::uint32_t rank : {0u, 1u}) {
    for (const std::uint32_t bucket : {0u, 1u}) Mark(rank, 3, bucket, 4.0f * rank);
    End(rank, 3);
  }
  reducer_.CompleteAll();
  ExpectComplete({0, 1});
  for (const std::uint32_t bucket : {0u, 1u}) EXPECT_EQ(Value(1, bucket), 2);
}

TEST_F(HoldTest, MemoryIsReleasedWhenItsStepIsVoid) {
  Begin(2);
  Mark(1, 2, 0, 1);
  Mark(1, 2, 1, 1);
  End(1, 2);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  EXPECT_TRUE(lost->Shared()) << "its gradients are in the step";
  ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, 2, "no memory").ok());
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
}

TEST_F(HoldTest, SourceThatIsLostInMidCopyStaysMapped) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) Mark(rank, 2, 0, 3);
  reducer_.CompleteAll();
  Lose(2);
  Return(2);
  executor_.RunAll();
  Mark(2, 2, 0, 9);  // copied from rank 0
  const auto lost = std::move(memory_[channel_ - 1][0]);
  Lose(0);
  EXPECT_EQ(executor_.pending(), 1u) << "the copy, and no release of what it reads";
  Copy();
  EXPECT_EQ(Value(2, 0), 3);
  EXPECT_FALSE(lost->Shared());
  EXPECT_FALSE(job_->HasEnded());
}

// The replacement maps its memory while the executor writes the words of a void step.
TEST_F(HoldTest, ReplacementSeesTheVoidStepInItsOwnWords) {
  Start(2);
  channel_ = Agree(Spec(40));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 1);
  reducer_.CompleteAll();
  TakeAll();
  ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, 2, "no memory").ok());
  ASSERT_EQ(executor_.pending(), 2u);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  ASSERT_EQ(Register(1, Spec(40)), channel_);
  ASSERT_TRUE(Map(1, channel_).ok());
  executor_.RunAll();
  EXPECT_EQ(lost->done(5), 1u) << "a lost session's words are not written";
  EXPECT_FALSE(lost->Shared());
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(rank).record->verdict), "STEP_ABANDONED");
    EXPECT_EQ(memory(rank, channel_).void_step(), 2u);
    EXPECT_EQ(Done(rank, 39), 2u);
  }
  EXPECT_FALSE(job_->HasEnded());
}

// A lost session had begun the step, and every rank has left since. A tick may still come while the
// table retires the empty job: work that it added would use layouts that no longer exist.
TEST_F(HoldTest, TickOfAnEmptyJobVoidsNoStep) {
  Start(2);
  channel_ = Agree(Spec(40));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 1);
  reducer_.CompleteAll();
  Mark(1, 2, 0, 1);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  ASSERT_EQ(Register(1, Spec(40)), channel_);
  ASSERT_TRUE(Map(1, channel_).ok());
  for (const std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(job_->Leave(Of(rank), /*exit=*/true).ok());
  }
  executor_.RunAll();
  ASSERT_TRUE(job_->Empty());
  clock_.Advance(kStepTimeoutNs);
  job_->Tick();
  EXPECT_EQ(executor_.pending(), 0u);
  EXPECT_TRUE(job_->Empty());
  EXPECT_EQ(job_->Snapshot().layouts.at(0).stats.steps_void, 0u);
}

TEST_F(HoldTest, LossBetweenStepsReleasesTheMemoryAtOnce) {
  Begin(2);
  const auto lost = std::move(memory_[channel_ - 1][1]);
  Lose(1);
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
  Return(1);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 2u);
}

TEST_F(HoldTest, NothingOfTheLostSessionCounts) {
  Begin(2);
  const RankSession lost = Of(1);
  Lose(1);
  EXPECT_TRUE(job_->MarkReady(lost, channel_, 2, {0, 1}).ok());
  Return(1);
  TakeAll();
  EXPECT_TRUE(job_->MarkReady(lost, channel_, 2, {0, 1}).ok());
  EXPECT_TRUE(job_->EndStep(lost, channel_, 2, "").ok());
  job_->Lose(lost, absl::AbortedError("again"));
  DoStep(0, channel_, 2);
  EXPECT_EQ(reducer_.submitted(), 2u) << "only those of step 1";
  DoStep(1, channel_, 2);
  reducer_.CompleteAll();
  ExpectComplete({0, 1});
}

TEST_F(HoldTest, DeadlineDoesNotPassWhileARankIsHeld) {
  Begin(2);
  DoStep(0, channel_, 2);
  clock_.Advance(kStepTimeoutNs / 2);
  Lose(1);
  clock_.Advance(3 * kStepTimeoutNs);
  job_->Tick();
  ExpectSilence({0});
  Return(1);
  clock_.Advance(kStepTimeoutNs / 2 - 1);
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<StepDoneMessage>().empty());
  clock_.Advance(1);
  job_->Tick();
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_TIMEOUT");
}

TEST_F(HoldTest, JobEndsAfterHoldTimeoutOfWaiting) {
  Begin(3);
  Lose(1);
  Lose(2);
  job_->Tick();
  clock_.Advance(5 * kHoldTimeoutNs);
  job_->Tick();
  EXPECT_FALSE(job_->HasEnded()) << "nobody waits yet";
  DoStep(0, channel_, 2);
  job_->Tick();
  clock_.Advance(kHoldTimeoutNs);
  job_->Tick();
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANK_LOST");
  EXPECT_EQ(FieldOf(end, "rank"), "1");
  EXPECT_TRUE(Says(end, "rank 1, 2 of job")) << end;
  EXPECT_TRUE(Says(end, "hold_timeout, 50ms")) << end;
}

TEST_F(HoldTest, HoldTimeoutCountsTheWaitsOfOneStepTogether) {
  options_.hold_timeout_ns = 10 * kStepTimeoutNs;
  Begin(2);
  DoStep(0, channel_, 2);
  for (int death = 0; death < 3; ++death) {
    Lose(1);
    job_->Tick();
    clock_.Advance(3 * kStepTimeoutNs);
    job_->Tick();
    Return(1);
    job_->Tick();
  }
  DoStep(1, channel_, 2);
  reducer_.CompleteAll();
  DoStep(0, channel_, 3);
  Lose(1);
  job_->Tick();
  clock_.Advance(9 * kStepTimeoutNs);
  job_->Tick();
  EXPECT_FALSE(job_->HasEnded()) << "step 2 had its verdict";
  Return(1);
  job_->Tick();
  Lose(1);
  job_->Tick();
  clock_.Advance(kStepTimeoutNs);
  job_->Tick();
  EXPECT_TRUE(job_->HasEnded());
}

TEST_F(HoldTest, RankThatComesBackAndMapsNoMemoryIsWaitedForNoLongerThanHoldTimeout) {
  options_.hold_timeout_ns = kStepTimeoutNs / 2;
  Begin(2);
  Mark(0, 2, 0, 1);  // waits for the bucket
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  job_->Tick();
  clock_.Advance(kStepTimeoutNs / 2);
  job_->Tick();
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_TRUE(Says(end, "rank 1 of job 'run-7' was lost and did not come back")) << end;
}

TEST_F(HoldTest, LossEndsTheJobWhereTheRankCannotBeReplaced) {
  const auto expect_end = [this](std::uint32_t rank, const std::string& why) {
    EXPECT_TRUE(job_->HasEnded());
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_EQ(ReasonOf(end), "RANK_LOST");
    EXPECT_TRUE(Says(end, why)) << end;
  };
  Start(2);
  Lose(1);
  expect_end(0, "could not be held, because no layout was registered");
  sinks_.clear();
  Start(2);
  channel_ = Agree(Spec(2));
  Lose(1);
  expect_end(0, "layout 'model' had no complete step");
}

// A reduction may read the memory to which such a process still writes.
TEST_F(HoldTest, LossOfARankWhoseProcessMayLiveEndsTheJob) {
  for (const Reason reason :
       {reason::kLeaseExpired, reason::kStreamEnded, reason::kProtocolViolation}) {
    SCOPED_TRACE(reason.text());
    sinks_.clear();
    memory_.clear();
    Begin(2);
    job_->Lose(Of(1), MakeError(absl::StatusCode::kAborted, reason, "why"));
    const absl::Status end = Only<SessionEndMessage>(0).status;
    EXPECT_EQ(ReasonOf(end), "RANK_LOST");
    EXPECT_TRUE(Says(end, "because its process may live, and write to its gradients")) << end;
  }
}

TEST_F(HoldTest, LossOfTheLastRankWithTheStateEndsTheJob) {
  Begin(2);
  Lose(1);
  Return(1);
  TakeAll();
  Lose(0);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(1).status, "no other rank has the state"));
}

TEST_F(HoldTest, LossDuringAnAgreementEndsTheJob) {
  Begin(2);
  Register(0, Spec(1, "second"));
  Lose(1);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "layout 'second' was being agreed"));
}

TEST_F(HoldTest, RankThatCameBackHasTheStateAfterACompleteStep) {
  Begin(2);
  Lose(1);
  Return(1);
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 2);
  reducer_.CompleteAll();
  TakeAll();
  Lose(0);
  EXPECT_FALSE(job_->HasEnded());
  Return(0);
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 3);
  reducer_.CompleteAll();
  TakeAll();
}

// A second layout, of one bucket, that has completed step 1.
class TwoLayoutsHoldTest : public HoldTest {
 protected:
  void BeginBoth(std::uint32_t ranks) {
    Begin(ranks);
    second_ = Agree(Spec(1, "second"));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) DoStep(rank, second_, 1);
    reducer_.CompleteAll();
    TakeAll();
  }
  void ReturnToSecond(std::uint32_t rank) {
    ASSERT_EQ(Register(rank, Spec(1, "second")), second_);
    ASSERT_TRUE(Map(rank, second_).ok());
  }
  // Operations need live ranks.
  bool IsLive(std::uint32_t rank) {
    OperationSpec barrier;
    barrier.kind = OperationKind::kBarrier;
    return job_->Operate(Of(rank), 1, barrier, {}, kForever).ok();
  }
  void StepOf(const std::vector<std::uint32_t>& ranks, std::uint32_t channel, std::uint64_t step) {
    for (const std::uint32_t rank : ranks) DoStep(rank, channel, step);
    reducer_.CompleteAll();
  }

  std::uint32_t second_ = 0;
};

TEST_F(TwoLayoutsHoldTest, SecondOneCanStillBeRegisteredAfterAStepOfTheFirst) {
  BeginBoth(2);
  Lose(1);
  Return(1);
  StepOf({0, 1}, channel_, 2);
  EXPECT_FALSE(IsLive(1));
  ReturnToSecond(1);
  EXPECT_TRUE(IsLive(1));
}

TEST_F(TwoLayoutsHoldTest, RankIsNotLiveWhileASecondStepHasItsLostGradients) {
  BeginBoth(2);
  for (const std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(job_->MarkReady(Of(rank), second_, 2, {0}).ok());
  }
  reducer_.CompleteAll();
  Lose(1);
  Return(1);
  ReturnToSecond(1);
  StepOf({0, 1}, channel_, 2);
  EXPECT_FALSE(IsLive(1));
  EXPECT_EQ(ReasonOf(job_->Leave(Of(1), /*exit=*/false)), "PROTOCOL_VIOLATION");
  // A void step has no average that it could owe.
  ASSERT_TRUE(job_->AbandonStep(Of(0), second_, 2, "no memory").ok());
  Copy();
  EXPECT_TRUE(IsLive(1));
}

TEST_F(TwoLayoutsHoldTest, LayoutThatItHadReleasedIsNotNeeded) {
  BeginBoth(2);
  ASSERT_TRUE(job_->ReleaseLayout(Of(1), second_).ok());
  clock_.Advance(5'000'000'000);
  Lose(1);
  Return(1);
  StepOf({0, 1}, channel_, 2);
  EXPECT_TRUE(IsLive(1));
}

// Rank 0 has called the barrier after the step that healed rank 1. So rank 1's program calls it,
// too.
TEST_F(TwoLayoutsHoldTest, RankThatIsLiveAgainTakesPartInTheOpenBarrier) {
  const OperationSpec barrier;
  const auto call = [&](std::uint32_t rank, std::uint64_t sequence) {
    const absl::Status called = job_->Operate(Of(rank), sequence, barrier, {}, kForever);
    EXPECT_TRUE(called.ok()) << called;
  };
  BeginBoth(3);
  Lose(1);
  Return(1);
  StepOf({0, 1, 2}, channel_, 2);
  call(0, 1);
  ReturnToSecond(1);
  EXPECT_EQ(Only<HealedMessage>(1).next_sequence, 1u);
  call(2, 1);
  EXPECT_TRUE(sink(0).Of<OperationDoneMessage>().empty()) << "rank 1 has not called it";
  call(1, 1);
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_EQ(Only<OperationDoneMessage>(rank).sequence, 1u);
  }
}

// An exception destroys a trainer's layouts before its session.
TEST_F(TwoLayoutsHoldTest, LayoutsReleasedAtTheEndOfAProcessAreNeeded) {
  BeginBoth(2);
  ASSERT_TRUE(job_->ReleaseLayout(Of(1), second_).ok());
  ASSERT_TRUE(job_->ReleaseLayout(Of(1), channel_).ok());
  Lose(1);
  Return(1);
  ReturnToSecond(1);
  StepOf({0, 1}, channel_, 2);
  StepOf({0, 1}, second_, 2);
  EXPECT_TRUE(IsLive(1));
}

class HoldOperationTest : public HoldTest {
 protected:
  HoldOperationTest() {
    barrier_.kind = OperationKind::kBarrier;
    broadcast_.kind = OperationKind::kBroadcast;
    broadcast_.bytes = sizeof(staging_[0]);
    sum_.kind = OperationKind::kAllReduce;
    sum_.dtype = DataType::kFloat32;
    sum_.op = ReduceOp::kSum;
    sum_.count = 1;
  }
  void Call(std::uint32_t rank, std::uint64_t sequence, const OperationSpec& spec) {
    const StagingMemory memory{nullptr, reinterpret_cast<std::byte*>(&staging_[rank]),
                               sizeof(staging_[rank])};
    const absl::Status called = job_->Operate(Of(rank), sequence, spec, memory, kForever);
    EXPECT_TRUE(called.ok()) << called;
  }
  bool Answered(std::uint32_t rank) {
    const bool answered = !sink(rank).Of<OperationDoneMessage>().empty();
    sink(rank).Take();
    return answered;
  }
  // The root writes its chunk, and `readers` read it.
  void Move(std::uint32_t root, std::uint64_t sequence, const std::vector<std::uint32_t>& readers) {
    EXPECT_TRUE(job_->ChunkWritten(Of(root), sequence, 0, broadcast_.bytes).ok());
    executor_.RunAll();
    for (const std::uint32_t rank : readers) {
      EXPECT_TRUE(job_->ChunkRead(Of(rank), sequence, 0).ok());
    }
  }
  void ExpectEnd(std::uint32_t rank, const std::string& why) {
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_EQ(ReasonOf(end), "RANK_LOST");
    EXPECT_TRUE(Says(end, why)) << end;
  }

  float staging_[3] = {1, 2, 4};
  OperationSpec barrier_, broadcast_, sum_;
};

TEST_F(HoldOperationTest, BarrierCompletesWithoutAHeldRank) {
  Begin(3);
  Call(0, 1, barrier_);
  Lose(2);
  EXPECT_FALSE(Answered(0));
  Call(1, 1, barrier_);
  EXPECT_TRUE(Answered(0));
  EXPECT_TRUE(Answered(1));
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, barrier_);
  EXPECT_TRUE(Answered(0));
}

TEST_F(HoldOperationTest, BarrierThatOnlyTheLostRankHadCalledBeginsAnew) {
  Begin(3);
  ASSERT_TRUE(job_->Operate(Of(2), 1, barrier_, {}, /*deadline_ns=*/clock_.NowNs() + 5).ok());
  Lose(2);
  clock_.Advance(10);
  job_->Tick();
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, barrier_);
  EXPECT_TRUE(Answered(0));
  EXPECT_TRUE(Answered(1));
}

TEST_F(HoldOperationTest, BarrierCompletesWhenItsLastRankIsLost) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, barrier_);
  Lose(2);
  EXPECT_TRUE(Answered(0));
  EXPECT_TRUE(Answered(1));
}

TEST_F(HoldOperationTest, BroadcastFromALivingRootCompletesWithoutAHeldRank) {
  for (const int lost_after : {0, 1, 2, 3}) {
    SCOPED_TRACE(lost_after);
    sinks_.clear();
    memory_.clear();
    rejoined_.clear();
    staging_[0] = 1;
    staging_[1] = 2;
    Begin(3);
    if (lost_after == 0) Lose(2);
    for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, broadcast_);
    if (lost_after > 1) Call(2, 1, broadcast_);
    if (lost_after == 1 || lost_after == 2) Lose(2);
    if (lost_after < 3) {
      Move(0, 1, {1});
    } else {
      EXPECT_TRUE(job_->ChunkWritten(Of(0), 1, 0, broadcast_.bytes).ok());
      executor_.RunAll();
      EXPECT_TRUE(job_->ChunkRead(Of(1), 1, 0).ok());
      EXPECT_FALSE(Answered(1));
      Lose(2);
    }
    EXPECT_TRUE(Answered(0));
    EXPECT_TRUE(Answered(1));
    EXPECT_EQ(staging_[1], 1);
  }
}

TEST_F(HoldOperationTest, SumThatHasEveryRanksDataCompletes) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, sum_);
  Lose(1);
  EXPECT_FALSE(job_->HasEnded());
  ASSERT_TRUE(Rejoin(1).ok());
  reducer_.CompleteAll();
  EXPECT_TRUE(Answered(0));
  EXPECT_FALSE(Answered(1)) << "its lost session had called it";
  EXPECT_EQ(staging_[0], 3);
}

TEST_F(HoldOperationTest, ReplacementMayLeaveWhileTheSumOfItsLostSessionIsUnderWay) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, sum_);
  Lose(1);
  Return(1);
  const absl::Status left = job_->Leave(Of(1), /*exit=*/true);
  EXPECT_TRUE(left.ok()) << left;
  reducer_.CompleteAll();
  EXPECT_TRUE(Answered(0));
  EXPECT_EQ(staging_[0], 3);
}

TEST_F(HoldOperationTest, SumThatNeedsALostRankEndsTheJob) {
  Begin(2);
  Call(0, 1, sum_);
  Lose(1);
  ExpectEnd(0, "because operation 1 (all-reduce (sum) of 1 float32) needed it");
}

TEST_F(HoldOperationTest, OperationThatNeedsAHeldRankEndsTheJob) {
  broadcast_.root = 1;
  OperationSpec lowest = broadcast_;
  lowest.root = kRootIsLowestLive;
  for (const OperationSpec& spec : {sum_, broadcast_, lowest}) {
    SCOPED_TRACE(spec.Describe());
    sinks_.clear();
    memory_.clear();
    rejoined_.clear();
    Begin(2);
    Lose(1);
    Call(0, 1, spec);
    ExpectEnd(0, "needs it");
  }
}

TEST_F(HoldOperationTest, RankThatCameBackTakesPartOnceItsStepIsComplete) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 1, barrier_);
  Lose(1);
  Call(0, 2, barrier_);
  Return(1);
  EXPECT_EQ(ReasonOf(job_->Operate(Of(1), 3, barrier_, {}, kForever)), "PROTOCOL_VIOLATION");
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 2);
  reducer_.CompleteAll();
  TakeAll();
  Call(0, 3, barrier_);
  EXPECT_FALSE(Answered(0));
  Call(1, 3, barrier_);
  EXPECT_TRUE(Answered(0));
  EXPECT_TRUE(Answered(1));
}

// Each rank's program is: end the step, call a barrier.
class BarrierAfterEndTest : public HoldOperationTest {
 protected:
  // Ranks 0 and 1 live in step 2. Rank 2 is lost and has come back.
  void BeginWithReplacement() {
    Begin(3);
    for (const std::uint32_t rank : {0u, 1u, 2u}) Call(rank, 1, barrier_);
    Lose(2);
    Return(2);
    TakeAll();
  }
  void EndStep2(std::uint32_t rank) {
    DoStep(rank, channel_, 2);
    reducer_.CompleteAll();
  }
  std::uint64_t FirstOf(std::uint32_t rank) {
    const auto healed = sink(rank).Of<HealedMessage>();
    return healed.size() == 1 ? healed[0].next_sequence : 0;
  }
};

TEST_F(BarrierAfterEndTest, ReplacementTakesPartInTheBarrierThatIsOpenWhenItHeals) {
  BeginWithReplacement();
  EndStep2(0);
  EndStep2(2);
  Call(0, 2, barrier_);
  EndStep2(1);
  EXPECT_EQ(FirstOf(2), 2u);
  TakeAll();
  Call(2, 2, barrier_);
  EXPECT_FALSE(Answered(0)) << "rank 1 has not called it";
  Call(1, 2, barrier_);
  for (const std::uint32_t rank : {0u, 1u, 2u}) EXPECT_TRUE(Answered(rank)) << rank;
  for (const std::uint32_t rank : {0u, 1u, 2u}) DoStep(rank, channel_, 3);
  reducer_.CompleteAll();
  ExpectComplete({0, 1, 2});
}

TEST_F(BarrierAfterEndTest, BarrierThatTheOthersHaveEndedIsAnsweredAtOnce) {
  BeginWithReplacement();
  for (const std::uint32_t rank : {0u, 1u}) EndStep2(rank);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, barrier_);
  EXPECT_TRUE(Answered(0));
  EndStep2(2);
  EXPECT_EQ(FirstOf(2), 2u);
  TakeAll();
  Call(2, 2, barrier_);
  EXPECT_TRUE(Answered(2));
  for (const std::uint32_t rank : {0u, 1u, 2u}) DoStep(rank, channel_, 3);
  reducer_.CompleteAll();
  ExpectComplete({0, 1, 2});
  // The ranks count alike, so a sum has the data of one place in the program.
  for (const std::uint32_t rank : {0u, 1u, 2u}) Call(rank, 3, sum_);
  reducer_.CompleteAll();
  EXPECT_EQ(staging_[2], 7);
}

TEST_F(BarrierAfterEndTest, BarrierBeforeTheEndOfTheStepIsNotTheReplacements) {
  BeginWithReplacement();
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, barrier_);
  for (const std::uint32_t rank : {0u, 1u, 2u}) EndStep2(rank);
  EXPECT_EQ(FirstOf(2), 3u);
}

TEST_F(BarrierAfterEndTest, BroadcastThatTheOthersHaveEndedFailsOnTheReplacement) {
  BeginWithReplacement();
  for (const std::uint32_t rank : {0u, 1u}) EndStep2(rank);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, broadcast_);
  Move(0, 2, {1});
  EndStep2(2);
  TakeAll();
  Call(2, 2, broadcast_);
  const absl::Status failed = Only<OperationFailedMessage>(2).status;
  EXPECT_EQ(ReasonOf(failed), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(failed, "completed while this one was lost; its data is gone")) << failed;
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(BarrierAfterEndTest, ErrorOfAReplacementNamesWhatTheOthersCalled) {
  BeginWithReplacement();
  for (const std::uint32_t rank : {0u, 1u}) EndStep2(rank);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, barrier_);
  EndStep2(2);
  TakeAll();
  Call(2, 2, sum_);
  const absl::Status failed = Only<OperationFailedMessage>(2).status;
  EXPECT_EQ(ReasonOf(failed), "OPERATION_MISMATCH");
  EXPECT_TRUE(Says(failed, "rank 0 called barrier, rank 2 called all-reduce")) << failed;
}

TEST_F(BarrierAfterEndTest, BroadcastThatRunsWithoutTheReplacementEndsBeforeItHeals) {
  BeginWithReplacement();
  for (const std::uint32_t rank : {0u, 1u}) EndStep2(rank);
  for (const std::uint32_t rank : {0u, 1u}) Call(rank, 2, broadcast_);
  EndStep2(2);
  EXPECT_EQ(FirstOf(2), 0u);
  Move(0, 2, {1});
  EXPECT_EQ(FirstOf(2), 2u);
}

TEST_F(HoldTest, AnotherModelIsRefusedAndTheOthersStayHeld) {
  Begin(2);
  DoStep(0, channel_, 2);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  for (const LayoutSpec& spec : {Spec(3), Spec(2, "another")}) {
    const auto refused = job_->RegisterLayout(Of(1), Request(spec));
    EXPECT_EQ(ReasonOf(refused.status()), "LAYOUT_MISMATCH") << refused.status();
  }
  ExpectSilence({0});
  EXPECT_EQ(ReasonOf(job_->MarkReady(Of(1), channel_, 2, {0})), "PROTOCOL_VIOLATION");
  ASSERT_EQ(Register(1, Spec(2)), channel_);
  ASSERT_TRUE(Map(1, channel_).ok());
  TakeAll();
  DoStep(1, channel_, 2);
  reducer_.CompleteAll();
  ExpectComplete({0, 1});
}

TEST_F(HoldTest, LayoutIsNotAgreedWhileARankIsLost) {
  Begin(2);
  Lose(1);
  const auto refused = [this] {
    const absl::Status status = job_->RegisterLayout(Of(0), Request(Spec(1, "second"))).status();
    EXPECT_EQ(ReasonOf(status), "RANKS_LEFT");
    EXPECT_TRUE(Says(status, "'second' cannot be agreed: rank 1 was lost")) << status;
  };
  refused();
  Return(1);
  refused();
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 2);
  reducer_.CompleteAll();
  TakeAll();
  Agree(Spec(1, "second"));
}

// Its lost session may be in buckets that are reduced, and would be missing in the others.
TEST_F(HoldTest, RankThatCameBackMayNotLeaveBeforeItsStepIsComplete) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) Mark(rank, 2, 0, 1);
  reducer_.CompleteAll();
  Lose(2);
  Return(2);
  for (const bool exit : {true, false}) {
    const absl::Status left = job_->Leave(Of(2), exit);
    EXPECT_EQ(ReasonOf(left), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(left, exit ? "The running step has gradients of its lost session"
                                : "It can stay only after it has completed a step"))
        << left;
  }
  EXPECT_EQ(ReasonOf(job_->Finish(Of(2))), "PROTOCOL_VIOLATION");
}

TEST_F(HoldTest, MemoryThatWasNotMappedIsReleasedAtALoss) {
  Begin(2);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  Register(1, Spec(2));
  auto held = std::make_shared<int>();
  const std::weak_ptr<int> released = held;
  job_->KeepMemory(Of(1), channel_, std::move(held));
  executor_.RunAll();
  EXPECT_FALSE(released.expired());
  Lose(1);
  executor_.RunAll();
  EXPECT_TRUE(released.expired());
}

TEST_F(HoldTest, GpusAreRefusedByName) {
  Start(1);
  LayoutRequest request = Request(Spec(1));
  request.device = "GPU-1";
  const absl::Status registered = job_->RegisterLayout(Of(0), request).status();
  EXPECT_EQ(ReasonOf(registered), "LOSS_POLICY");
  EXPECT_TRUE(Says(registered, "host memory")) << registered;
}

TEST_F(HoldTest, StayingWhileARankIsLostEndsTheJob) {
  for (const bool returned : {false, true}) {
    SCOPED_TRACE(returned ? "returned" : "held");
    sinks_.clear();
    memory_.clear();
    rejoined_.clear();
    Begin(3);
    Lose(1);
    if (returned) Return(1);
    TakeAll();
    ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
    const absl::Status end = Only<SessionEndMessage>(2).status;
    EXPECT_EQ(ReasonOf(end), "RANK_LOST");
    EXPECT_TRUE(Says(end,
                     "rank 1 of job 'run-7' was lost and has not completed a step since, and rank "
                     "0 waits in LeaveAndStay"))
        << end;
  }
}

// The end of a run. Both ways to leave for good are the same here.
class LastLeaveTest : public HoldTest, public testing::WithParamInterface<bool> {
 protected:
  absl::Status LeaveForGood(std::uint32_t rank) {
    return GetParam() ? job_->Finish(Of(rank)) : job_->Leave(Of(rank), /*exit=*/true);
  }
  void ExpectGoodEnd(std::uint32_t rank) {
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_TRUE(end.ok()) << "rank " << rank << ": " << end;
  }
};

TEST_P(LastLeaveTest, EveryRankLeavesWhenTheLastOneDoes) {
  Begin(3);
  for (const std::uint32_t rank : {2u, 0u}) {
    ASSERT_TRUE(LeaveForGood(rank).ok());
    ExpectSilence({0, 1, 2});
  }
  EXPECT_EQ(ReasonOf(LeaveForGood(0)), "PROTOCOL_VIOLATION");
  ASSERT_TRUE(LeaveForGood(1).ok());
  for (const std::uint32_t rank : {0u, 1u, 2u}) ExpectGoodEnd(rank);
}

TEST_P(LastLeaveTest, RankThatHasLeftGetsNoMemory) {
  Begin(2);
  ASSERT_TRUE(LeaveForGood(0).ok());
  auto kept = std::make_shared<int>();
  const std::weak_ptr<int> released = kept;
  job_->KeepMemory(Of(0), channel_, std::move(kept));
  ASSERT_TRUE(Map(0, channel_).ok());
  executor_.RunAll();
  ExpectSilence({0, 1});
  EXPECT_TRUE(released.expired());
  EXPECT_FALSE(memory(0, channel_).Shared());
}

TEST_P(LastLeaveTest, SnapshotShowsTheRanksThatHaveLeftAndWait) {
  Begin(2);
  ASSERT_TRUE(LeaveForGood(0).ok());
  const JobSnapshot snapshot = job_->Snapshot();
  ASSERT_EQ(snapshot.ranks.size(), 2u);
  EXPECT_EQ(snapshot.ranks[0].state, GetParam() ? RankState::kFinished : RankState::kExited);
  EXPECT_EQ(snapshot.ranks[1].state, RankState::kLive);
}

TEST_P(LastLeaveTest, RankThatIsLostBeforeItHasLeftIsReplacedFirst) {
  Begin(2);
  ASSERT_TRUE(LeaveForGood(0).ok());
  Lose(1);
  EXPECT_FALSE(job_->HasEnded());
  ExpectSilence({0});
  Return(1);
  TakeAll();
  ASSERT_TRUE(LeaveForGood(1).ok());
  for (const std::uint32_t rank : {0u, 1u}) ExpectGoodEnd(rank);
}

TEST_P(LastLeaveTest, ReplacementLeavesWithoutAnyLayout) {
  Begin(2);
  Lose(1);
  ASSERT_TRUE(LeaveForGood(0).ok());
  ASSERT_TRUE(Rejoin(1).ok());
  ASSERT_TRUE(LeaveForGood(1).ok());
  for (const std::uint32_t rank : {0u, 1u}) ExpectGoodEnd(rank);
}

TEST_P(LastLeaveTest, LeavingRankThatDiesIsNotLost) {
  Begin(3);
  ASSERT_TRUE(LeaveForGood(0).ok());
  Lose(0);
  EXPECT_FALSE(job_->HasEnded());
  for (const std::uint32_t rank : {1u, 2u}) ASSERT_TRUE(LeaveForGood(rank).ok());
  for (const std::uint32_t rank : {1u, 2u}) ExpectGoodEnd(rank);
}

TEST_P(LastLeaveTest, LostRankIsNotWaitedForLongerThanHoldTimeout) {
  Begin(2);
  Lose(1);
  ASSERT_TRUE(LeaveForGood(0).ok());
  job_->Tick();
  clock_.Advance(kHoldTimeoutNs - 1);
  job_->Tick();
  EXPECT_FALSE(job_->HasEnded());
  clock_.Advance(1);
  job_->Tick();
  EXPECT_TRUE(job_->HasEnded());
  ExpectGoodEnd(0);
}

TEST_P(LastLeaveTest, RanksThatCannotBeReplacedLeaveAtOnce) {
  Start(2);
  ASSERT_TRUE(LeaveForGood(0).ok());
  ExpectGoodEnd(0);
}

INSTANTIATE_TEST_SUITE_P(Hold, LastLeaveTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "ByFinish" : "ByLeave"; });

TEST_F(HoldTest, RankThatLeavesEarlyEndsTheJobAndEveryRankLearnsWhy) {
  Begin(3);
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  clock_.Advance(2'000'000);
  Mark(2, 2, 0, 1);
  EXPECT_TRUE(job_->HasEnded());
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_EQ(ReasonOf(end), "RANK_FINISHED") << rank;
    EXPECT_EQ(FieldOf(end, "rank"), "1");
    EXPECT_TRUE(Says(end,
                     "rank 1 of job 'run-7' left 2ms ago, and rank 2 has begun step 2 of layout "
                     "'model'. With on_rank_loss=hold this needs every rank"))
        << end;
  }
}

TEST_F(HoldTest, RankThatLeavesWhileAnotherOneHasBegunTheNextStepLeavesEarly) {
  Begin(2);
  Mark(1, 2, 0, 1);
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(rank).status), "RANK_FINISHED");
  }
}

// No step was complete, so its session has ended at once.
TEST_F(HoldTest, RankThatLeftBeforeTheFirstStepEndsTheJobAtThatStep) {
  Start(2);
  channel_ = Agree(Spec(2));
  TakeAll();
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
  EXPECT_TRUE(Only<SessionEndMessage>(0).status.ok());
  Mark(1, 1, 0, 1);
  reducer_.CompleteAll();
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(1).status), "RANK_FINISHED");
}

TEST_F(HoldTest, CollectivesOfOtherLibrariesAreRefused) {
  Begin(2);
  ASSERT_TRUE(job_->BeginCollective(Of(0), "barrier").ok());
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(1).status), "LOSS_POLICY");
}

TEST_F(HoldTest, LayoutIsRegisteredOnceAndBeforeItsMemory) {
  Begin(2);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  EXPECT_EQ(ReasonOf(Map(1, channel_)), "PROTOCOL_VIOLATION");
  Register(1, Spec(2));
  EXPECT_EQ(ReasonOf(job_->RegisterLayout(Of(1), Request(Spec(2))).status()), "ALREADY_REGISTERED");
  EXPECT_TRUE(Map(1, channel_).ok());
}

TEST_F(HoldTest, RankBeyondTheWorldDoesNotEndAHeldJob) {
  Begin(2);
  EXPECT_TRUE(job_->Replaceable(7));
}

TEST_F(HoldTest, VoidStepIsVoidForTheNextSessionToo) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) Mark(rank, 2, 0, 1);
  reducer_.CompleteAll();
  Lose(1);
  Return(1);
  TakeAll();
  Mark(1, 2, 0, 1);  // its average is being copied
  ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, 2, "no memory").ok());
  Copy();
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(rank).record->verdict), "STEP_ABANDONED") << rank;
  }
  TakeAll();
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 3);
  reducer_.CompleteAll();
  ExpectComplete({0, 1});
}

TEST_F(HoldTest, LiveRankIsNotReplaced) {
  Begin(2);
  const absl::Status joined = job_->Join(1, 2, options_, 9999, std::make_shared<RecordingSink>());
  EXPECT_EQ(ReasonOf(joined), "RANK_OCCUPIED");
  EXPECT_TRUE(Says(joined, "only after its loss")) << joined;
  EXPECT_TRUE(job_->Replaceable(1));
}

TEST_F(HoldTest, DrainEndsAHeldStepAtOnce) {
  Begin(2);
  DoStep(0, channel_, 2);
  EXPECT_FALSE(job_->EndIfIdle(absl::UnavailableError("stopping")));
  Lose(1);
  EXPECT_TRUE(job_->EndIfIdle(absl::UnavailableError("stopping")));
  EXPECT_EQ(Only<SessionEndMessage>(0).status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(HoldTest, LateNoticeSaysThatTheRankIsLost) {
  options_.hold_timeout_ns = 60'000'000'000;
  Begin(2);
  DoStep(0, channel_, 2);
  Lose(1);
  job_->Tick();
  clock_.Advance(5'000'000'000);
  job_->Tick();
  ASSERT_FALSE(logged_.empty());
  EXPECT_TRUE(absl::StrContains(logged_[0], "rank 1 has not come back after its loss"))
      << logged_[0];
}

}  // namespace
}  // namespace gradsync::daemon
