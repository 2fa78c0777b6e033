// How the ranks of a job replace a layout between two of its steps.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class LayoutReplacementTest : public JobFixture {
 protected:
  // Two ranks with a layout of two buckets. Step 1 is complete.
  void SetUp() override {
    Start(2);
    old_ = Agree(Spec(2));
    WholeStep(old_, 1);
    TakeAll();
  }

  void WholeStep(std::uint32_t channel, std::uint64_t step) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) DoStep(rank, channel, step);
    reducer_.CompleteAll();
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(Only<StepDoneMessage>(rank).record->verdict.ok());
    }
  }

  absl::StatusOr<Job::Registration> Ask(std::uint32_t rank, const LayoutSpec& spec,
                                        std::uint32_t replaces,
                                        std::uint64_t deadline_ns = kForever) {
    LayoutRequest request = Request(spec, deadline_ns);
    request.replaces = replaces;
    return job_->RegisterLayout(Of(rank), std::move(request));
  }

  // Both ranks replace `old`; returns the new channel.
  std::uint32_t Replace(const LayoutSpec& spec, std::uint32_t old) {
    std::uint32_t channel = 0;
    for (std::uint32_t rank = 0; rank < 2; ++rank) channel = Register(rank, spec, old);
    for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(Map(rank, channel).ok());
    return channel;
  }

  void ExpectOldGoesOn(std::uint64_t step) {
    TakeAll();
    EXPECT_EQ(job_->Snapshot().layouts.size(), 1u);
    WholeStep(old_, step);
  }

  std::uint32_t old_ = 0;
};

TEST_F(LayoutReplacementTest, KeepsStepNumbersStatisticsAndName) {
  const std::uint32_t channel = Replace(Spec(3), old_);
  EXPECT_NE(channel, old_);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const auto ready = Only<LayoutReadyMessage>(rank);
    EXPECT_EQ(ready.channel, channel);
    EXPECT_EQ(ready.first_step, 2u);
  }
  executor_.RunAll();
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_FALSE(memory(rank, old_).Shared());
  WholeStep(channel, 2);
  const JobSnapshot snapshot = job_->Snapshot();
  ASSERT_EQ(snapshot.layouts.size(), 1u);
  EXPECT_EQ(snapshot.layouts[0].channel, channel);
  EXPECT_EQ(snapshot.layouts[0].name, "model");
  EXPECT_EQ(snapshot.layouts[0].buckets, 3u);
  EXPECT_EQ(snapshot.layouts[0].stats.steps_complete, 2u);
  EXPECT_EQ(job_->Timeline("model", 9)->size(), 1u);  // a new timeline
  const std::uint32_t next = Replace(Spec(3), channel);
  TakeAll();
  WholeStep(next, 3);
  EXPECT_EQ(job_->Timeline("model", 9)->size(), 2u);
}

TEST_F(LayoutReplacementTest, LaterMessagesOnTheOldChannelAreRefused) {
  Replace(Spec(2), old_);
  for (const absl::Status& status :
       {job_->MarkReady(Of(0), old_, 2, {0}), job_->EndStep(Of(0), old_, 1, ""),
        job_->AbandonStep(Of(0), old_, 2, ""), job_->CheckReplaces(Of(0), old_)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "UNKNOWN_CHANNEL");
    EXPECT_TRUE(Says(status, "it was replaced")) << status;
    EXPECT_EQ(FieldOf(status, "channel"), std::to_string(old_));
  }
  EXPECT_TRUE(job_->ArenaMapped(Of(0), old_, {}).ok());  // it was in flight
}

TEST_F(LayoutReplacementTest, EarlierStepIsStaleOnTheNewChannel) {
  const std::uint32_t channel = Replace(Spec(2), old_);
  EXPECT_EQ(ReasonOf(job_->MarkReady(Of(0), channel, 1, {0})), "STALE_STEP");
}

TEST_F(LayoutReplacementTest, RankCannotUseTheOldChannelAfterItsRequest) {
  const std::uint32_t channel = Register(0, Spec(3), old_);
  const absl::Status used = job_->MarkReady(Of(0), old_, 2, {0});
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(used), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(used, "rank 0 is replacing layout 'model'")) << used;
  EXPECT_EQ(FieldOf(used, "step"), "2");
  // The other rank has not asked yet: it may use the channel, and abandon the step.
  EXPECT_TRUE(job_->MarkReady(Of(1), old_, 2, {0}).ok());
  EXPECT_EQ(ReasonOf(job_->CheckReplaces(Of(1), old_)), "PROTOCOL_VIOLATION");
  ASSERT_TRUE(job_->AbandonStep(Of(1), old_, 2, "to replace").ok());
  EXPECT_EQ(Register(1, Spec(3), old_), channel);
  TakeAll();
  for (std::uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(Map(rank, channel).ok());
  EXPECT_EQ(Only<LayoutReadyMessage>(0).first_step, 3u);
}

TEST_F(LayoutReplacementTest, OnlyAReadyLayoutBetweenStepsMayBeReplaced) {
  EXPECT_EQ(ReasonOf(job_->CheckReplaces(Of(0), 77)), "UNKNOWN_CHANNEL");
  const std::uint32_t pending = Register(1, Spec(1, "another"));
  const absl::Status not_ready = job_->CheckReplaces(Of(0), pending);
  EXPECT_EQ(ReasonOf(not_ready), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(not_ready, "not ready")) << not_ready;
  ASSERT_TRUE(job_->MarkReady(Of(0), old_, 2, {1}).ok());
  const absl::Status open = job_->CheckReplaces(Of(0), old_);
  EXPECT_EQ(open.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Says(open, "whose step 2 it is in")) << open;
  EXPECT_EQ(FieldOf(open, "rank"), "0");
  EXPECT_TRUE(job_->CheckReplaces(Of(1), old_).ok());
}

TEST_F(LayoutReplacementTest, MismatchFailsItAndTheOldLayoutContinues) {
  const struct {
    LayoutSpec spec;
    bool replaces;
    const char* says;
  } kOthers[] = {{Spec(4), true, "parameter 3: none on rank 0"},
                 {Spec(3), false, "replaces that of channel 1 on rank 0, no layout on rank 1"},
                 {Spec(3, "renamed"), true, "name: 'model' on rank 0, 'renamed' on rank 1"}};
  std::uint64_t step = 2;
  for (const auto& other : kOthers) {
    const std::uint32_t channel = Register(0, Spec(3), old_);
    ASSERT_TRUE(Map(0, channel).ok());
    const absl::Status refused = Ask(1, other.spec, other.replaces ? old_ : 0).status();
    for (const absl::Status& status : {refused, Only<LayoutFailedMessage>(0).status}) {
      EXPECT_EQ(ReasonOf(status), "LAYOUT_MISMATCH");
      EXPECT_TRUE(Says(status, other.says)) << status;
    }
    executor_.RunAll();
    EXPECT_FALSE(memory(0, channel).Shared());
    ExpectOldGoesOn(step++);
    TakeAll();
  }
  // The old layout can still be replaced.
  Replace(Spec(3), old_);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, step);
}

TEST_F(LayoutReplacementTest, LateRankGetsTheTimeoutOnceAndTheOldLayoutContinues) {
  ASSERT_TRUE(Ask(0, Spec(3), old_, clock_.NowNs() + 100).ok());
  clock_.Advance(100);
  job_->Tick();
  EXPECT_EQ(ReasonOf(Only<LayoutFailedMessage>(0).status), "LAYOUT_TIMEOUT");
  EXPECT_EQ(ReasonOf(Ask(1, Spec(3), old_).status()), "LAYOUT_TIMEOUT");
  ExpectOldGoesOn(2);
  TakeAll();
  Replace(Spec(3), old_);
  Only<LayoutReadyMessage>(0);
}

TEST_F(LayoutReplacementTest, RefusalFailsItOnEveryRankAndTheOldLayoutContinues) {
  const std::uint32_t channel = Register(0, Spec(3), old_);
  Register(1, Spec(3), old_);
  job_->RefuseLayout(Of(1), channel, absl::ResourceExhaustedError("quota"));
  EXPECT_EQ(ReasonOf(Only<LayoutFailedMessage>(0).status), "LAYOUT_REFUSED");
  EXPECT_TRUE(sink(1).messages().empty());  // rank 1 gets the answer to its own request
  ExpectOldGoesOn(2);
}

TEST_F(LayoutReplacementTest, LossErrorNamesTheReplacementAndAllMemoryIsFreed) {
  const std::uint32_t channel = Register(0, Spec(3), old_);
  ASSERT_TRUE(Map(0, channel).ok());
  Lose(1);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "while layout 'model' was being replaced"));
  executor_.RunAll();
  EXPECT_FALSE(memory(0, channel).Shared());
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_FALSE(memory(rank, old_).Shared());
}

TEST_F(LayoutReplacementTest, DoesNotWaitForARankThatExits) {
  const std::uint32_t channel = Register(0, Spec(3), old_);
  ASSERT_TRUE(Map(0, channel).ok());
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  EXPECT_EQ(Only<LayoutReadyMessage>(0).first_step, 2u);
  executor_.RunAll();
  EXPECT_FALSE(memory(0, old_).Shared());
  DoStep(0, channel, 2);
  reducer_.CompleteAll();
  EXPECT_EQ(Only<StepDoneMessage>(0).record->live_ranks, 1u);
}

TEST_F(LayoutReplacementTest, OldLayoutContinuesWithoutARankThatExits) {
  Register(0, Spec(3), old_);
  DoStep(1, old_, 2);
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(1).record->verdict.ok());
}

TEST_F(LayoutReplacementTest, ObjectsHeldForTheOldLayoutAreFreed) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  job_->KeepMemory(Of(0), old_, std::move(held));
  const std::uint32_t channel = Replace(Spec(2), old_);
  EXPECT_FALSE(watch.expired());  // the executor frees it
  executor_.RunAll();
  EXPECT_TRUE(watch.expired());
  auto late = std::make_shared<int>(2);
  const std::weak_ptr<int> late_watch = late;
  job_->KeepMemory(Of(0), old_, std::move(late));
  executor_.RunAll();
  EXPECT_TRUE(late_watch.expired());
  EXPECT_EQ(job_->Snapshot().layouts[0].channel, channel);
}

TEST_F(LayoutReplacementTest, ThousandReplacementsLeaveOneLayout) {
  // The job has as many layouts as it may have. Replacements do not count.
  for (int i = 1; i < 256; ++i) Agree(Spec(1, "other" + std::to_string(i)));
  EXPECT_EQ(ReasonOf(job_->RegisterLayout(Of(0), Request(Spec(1, "last"))).status()), "QUOTA");
  std::uint32_t channel = old_;
  for (std::uint64_t step = 2; step <= 1001; ++step) {
    const std::uint32_t replaced = channel;
    channel = Replace(Spec(1 + step % 3), replaced);
    EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, step);
    TakeAll();
    WholeStep(channel, step);
    executor_.RunAll();
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_FALSE(memory(rank, replaced).Shared());
      memory_[replaced - 1][rank].reset();
    }
    TakeAll();
  }
  const JobSnapshot snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.layouts.size(), 256u);
  EXPECT_EQ(snapshot.layouts.back().stats.steps_complete, 1001u);
}

TEST_F(LayoutReplacementTest, WaitsForTheEndOfAVoidStep) {
  const LayoutSpec spec = Spec(40, "large");
  const std::uint32_t large = Agree(spec);
  ASSERT_TRUE(job_->MarkReady(Of(0), large, 1, {0}).ok());
  clock_.Advance(kStepTimeoutNs);
  job_->Tick();
  TakeAll();
  ASSERT_EQ(executor_.pending(), 2u) << "they write the void step's words";
  // Rank 0 does not wait for the verdict, and rank 1 has not begun the step.
  ASSERT_TRUE(job_->ReleaseLayout(Of(0), large).ok());
  Register(0, spec);
  const std::uint32_t channel = Register(1, spec, large);
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(Map(rank, channel).ok());
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<LayoutReadyMessage>().empty());
  executor_.RunAll();
  job_->Tick();
  EXPECT_EQ(Only<LayoutReadyMessage>(0).first_step, 2u);
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 2u);
  executor_.RunAll();
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_FALSE(memory(rank, large).Shared());
}

TEST_F(LayoutReplacementTest, StepOfARankThatHasReleasedTheLayoutIsVoidFirst) {
  DoStep(0, old_, 2);
  ASSERT_TRUE(job_->ReleaseLayout(Of(0), old_).ok());
  Register(0, Spec(3));
  const std::uint32_t channel = Register(1, Spec(3), old_);
  for (std::uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(Map(rank, channel).ok());
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
  job_->Tick();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const absl::Status verdict = Only<StepDoneMessage>(rank).record->verdict;
    EXPECT_EQ(ReasonOf(verdict), "LAYOUT_RELEASED");
    EXPECT_EQ(FieldOf(verdict, "rank"), "0");
    EXPECT_EQ(FieldOf(verdict, "step"), "2");
    EXPECT_EQ(Only<LayoutReadyMessage>(rank).first_step, 3u);
  }
  executor_.RunAll();
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_FALSE(memory(rank, old_).Shared());
  TakeAll();
  WholeStep(channel, 3);
}

TEST_F(LayoutReplacementTest, VerdictNamesARankOfTheStep) {
  // Another job, of three ranks. Rank 0 has released the layout, and left.
  sinks_.clear();
  memory_.clear();
  Start(3);
  old_ = Agree(Spec(2));
  ASSERT_TRUE(job_->ReleaseLayout(Of(0), old_).ok());
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/true).ok());
  DoStep(1, old_, 1);
  ASSERT_TRUE(job_->ReleaseLayout(Of(1), old_).ok());
  Register(1, Spec(3));
  const std::uint32_t channel = Register(2, Spec(3), old_);
  for (std::uint32_t rank = 1; rank < 3; ++rank) ASSERT_TRUE(Map(rank, channel).ok());
  job_->Tick();
  for (std::uint32_t rank = 1; rank < 3; ++rank) {
    EXPECT_EQ(FieldOf(Only<StepDoneMessage>(rank).record->verdict, "rank"), "1");
  }
}

TEST_F(LayoutReplacementTest, WaitsForAStepThatEveryRankHasEnded) {
  // Another job, of three ranks. Rank 2 replaces the layout, and leaves.
  sinks_.clear();
  memory_.clear();
  Start(3);
  old_ = Agree(Spec(2));
  const std::uint32_t channel = Register(2, Spec(3), old_);
  for (std::uint32_t rank = 0; rank < 2; ++rank) DoStep(rank, old_, 1);
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/true).ok());
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(job_->ReleaseLayout(Of(rank), old_).ok());
    ASSERT_EQ(Register(rank, Spec(3)), channel);
    ASSERT_TRUE(Map(rank, channel).ok());
  }
  job_->Tick();
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
  reducer_.CompleteAll();
  job_->Tick();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(Only<StepDoneMessage>(rank).record->verdict.ok());
    Only<LayoutReadyMessage>(rank);
  }
}

}  // namespace
}  // namespace gradsync::daemon
