// How the ranks of a job release a layout: each at its own time, without waiting for the others.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

// How long a step waits for a rank that has released the layout.
constexpr std::uint64_t kPatienceNs = 5'000'000'000;

class LayoutReleaseTest : public JobFixture {
 protected:
  // Two ranks with a layout of two buckets. Step 1 is complete.
  void SetUp() override {
    Start(2, /*divide_by_world=*/false, /*step_timeout_ns=*/100 * kPatienceNs);
    channel_ = Agree(Spec(2));
    WholeStep(channel_, 1);
  }

  void WholeStep(std::uint32_t channel, std::uint64_t step) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) DoStep(rank, channel, step);
    reducer_.CompleteAll();
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(Only<StepDoneMessage>(rank).record->verdict.ok());
    }
    TakeAll();
  }
  void Release(std::uint32_t rank, std::uint32_t channel) {
    const absl::Status released = job_->ReleaseLayout(Of(rank), channel);
    EXPECT_TRUE(released.ok()) << released;
    executor_.RunAll();
  }
  void Wait(std::uint64_t ns) {
    clock_.Advance(ns);
    job_->Tick();
  }
  bool Shared(std::uint32_t rank, std::uint32_t channel) {
    executor_.RunAll();
    return memory(rank, channel).Shared();
  }
  std::size_t layouts() const { return job_->Snapshot().layouts.size(); }
  absl::Status Ask(std::uint32_t rank, const LayoutSpec& spec, std::uint32_t replaces = 0) {
    LayoutRequest request = Request(spec);
    request.replaces = replaces;
    return job_->RegisterLayout(Of(rank), std::move(request)).status();
  }
  // The running step is void because of `rank`.
  void ExpectReleasedBy(std::uint32_t rank, std::uint32_t told, std::uint64_t step) {
    const absl::Status verdict = Only<StepDoneMessage>(told).record->verdict;
    EXPECT_EQ(verdict.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(verdict), "LAYOUT_RELEASED");
    EXPECT_TRUE(Says(verdict, "rank " + std::to_string(rank) + " has released")) << verdict;
    EXPECT_TRUE(Says(verdict, "'model'")) << verdict;
    EXPECT_EQ(FieldOf(verdict, "rank"), std::to_string(rank));
    EXPECT_EQ(FieldOf(verdict, "step"), std::to_string(step));
    EXPECT_EQ(FieldOf(verdict, "channel"), std::to_string(channel_));
    TakeAll();
  }

  std::uint32_t channel_ = 0;
};

TEST_F(LayoutReleaseTest, EachRanksMemoryIsFreedAtOnceAndTheLayoutGoesWithTheLastRank) {
  Release(1, channel_);
  EXPECT_FALSE(Shared(1, channel_));
  EXPECT_TRUE(Shared(0, channel_));
  EXPECT_EQ(layouts(), 1u);
  Release(0, channel_);
  EXPECT_FALSE(Shared(0, channel_));
  EXPECT_EQ(layouts(), 0u);
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
}

TEST_F(LayoutReleaseTest, StatisticsAndStepsOutliveTheLayoutUntilAnotherOneHasItsName) {
  Release(0, channel_);
  EXPECT_EQ(job_->Snapshot().released_layouts.size(), 0u);
  Release(1, channel_);
  const std::vector<LayoutSnapshot> released = job_->Snapshot().released_layouts;
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].name, "model");
  EXPECT_EQ(released[0].stats.steps_complete, 1u);
  ASSERT_TRUE(job_->Timeline("model", 9).has_value());
  EXPECT_EQ(job_->Timeline("model", 9)->size(), 1u);
  EXPECT_EQ(job_->Timeline("model", 0)->size(), 0u);

  channel_ = Agree(Spec(3));
  EXPECT_EQ(job_->Snapshot().released_layouts.size(), 0u);
  EXPECT_EQ(job_->Timeline("model", 9)->size(), 0u);  // of the new one
}

TEST_F(LayoutReleaseTest, StatisticsOfTheLastFourReleasedLayoutsAreKept) {
  for (int i = 0; i < 6; ++i) {
    LayoutSpec spec = Spec(2);
    spec.name = "layout" + std::to_string(i);
    const std::uint32_t channel = Agree(spec);
    for (std::uint32_t rank = 0; rank < 2; ++rank) Release(rank, channel);
    TakeAll();
  }
  const std::vector<LayoutSnapshot> released = job_->Snapshot().released_layouts;
  ASSERT_EQ(released.size(), 4u);
  EXPECT_EQ(released.front().name, "layout2");
  EXPECT_EQ(released.back().name, "layout5");
}

TEST_F(LayoutReleaseTest, ObjectsHeldForTheRankAreFreed) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  job_->KeepMemory(Of(0), channel_, std::move(held));
  Release(0, channel_);
  EXPECT_TRUE(watch.expired());
}

TEST_F(LayoutReleaseTest, NameIsFreeForEachRankAtOnce) {
  Release(0, channel_);
  const std::uint32_t next = Register(0, Spec(3));
  EXPECT_NE(next, channel_);
  ASSERT_TRUE(Map(0, next).ok());
  EXPECT_TRUE(sink(0).messages().empty());  // waits for rank 1
  Release(1, channel_);
  EXPECT_EQ(layouts(), 1u);
  EXPECT_EQ(Register(1, Spec(3)), next);
  ASSERT_TRUE(Map(1, next).ok());
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Only<LayoutReadyMessage>(rank).first_step, 1u);
  }
  TakeAll();
  WholeStep(next, 1);
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.steps_complete, 1u);  // of the new layout
}

TEST_F(LayoutReleaseTest, RankThatStillHasTheNameFailsTheRegistrationOnEveryRank) {
  Release(0, channel_);
  const std::uint32_t next = Register(0, Spec(3));
  const absl::Status taken = Ask(1, Spec(3));
  EXPECT_EQ(ReasonOf(taken), "ALREADY_REGISTERED");
  EXPECT_TRUE(Says(taken, "Release or replace it")) << taken;
  const absl::Status refused = Only<LayoutFailedMessage>(0).status;
  EXPECT_EQ(ReasonOf(refused), "LAYOUT_REFUSED");
  EXPECT_EQ(FieldOf(refused, "rank"), "1");
  EXPECT_TRUE(Says(refused, "rank 1 has registered layout 'model' already")) << refused;
  EXPECT_FALSE(Shared(0, next));
  // The next try is a new one.
  Release(1, channel_);
  for (std::uint32_t rank = 0; rank < 2; ++rank) Register(rank, Spec(3));
  EXPECT_EQ(layouts(), 1u);
}

// On one rank the old layout's owner is gone; on the other the new layout takes its place.
TEST_F(LayoutReleaseTest, ReplacementMatchesTheRegistrationOfARankThatHasReleasedTheOldLayout) {
  std::uint32_t old = channel_;
  std::uint64_t step = 2;
  for (const bool replacing_first : {true, false}) {
    for (const char* name : {"model", "renamed"}) {
      Release(0, old);
      std::uint32_t next = 0;
      if (replacing_first) next = Register(1, Spec(3, name), old);
      const std::uint32_t asked = Register(0, Spec(3, name));
      if (!replacing_first) next = Register(1, Spec(3, name), old);
      EXPECT_EQ(asked, next);
      for (std::uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(Map(rank, next).ok());
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        EXPECT_EQ(Only<LayoutReadyMessage>(rank).first_step, step);
        EXPECT_FALSE(Shared(rank, old));
      }
      TakeAll();
      EXPECT_EQ(layouts(), 1u);
      WholeStep(next, step++);
      old = next;
    }
  }
}

TEST_F(LayoutReleaseTest, ReplacementDoesNotMatchTheRegistrationOfARankThatHasTheOldLayout) {
  Register(0, Spec(3, "other"));
  const absl::Status differs = Ask(1, Spec(3, "other"), channel_);
  EXPECT_EQ(ReasonOf(differs), "LAYOUT_MISMATCH");
  EXPECT_TRUE(Says(differs, "replaces no layout on rank 0, that of channel 1 on rank 1"))
      << differs;
}

TEST_F(LayoutReleaseTest, ReplacementDoesNotMatchARegistrationThatIsOlderThanTheReplacedLayout) {
  const std::uint32_t older = Register(0, Spec(3, "older"));
  const std::uint32_t newer = Agree(Spec(2, "newer"));
  Release(0, newer);
  const absl::Status differs = Ask(1, Spec(3, "older"), newer);
  for (const absl::Status& status : {differs, Only<LayoutFailedMessage>(0).status}) {
    EXPECT_EQ(ReasonOf(status), "LAYOUT_MISMATCH");
    EXPECT_TRUE(Says(status, "replaces no layout on rank 0, that of channel 3 on rank 1"))
        << status;
  }
  // These were in flight. If they complete an agreement, it drops the next layout in order.
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(job_->ArenaMapped(Of(rank), older, {}).ok());
  }
  EXPECT_TRUE(Shared(1, newer));
  Release(1, newer);
  EXPECT_FALSE(Shared(1, newer));
  EXPECT_EQ(layouts(), 1u);
}

TEST_F(LayoutReleaseTest, LayoutHasOneReplacement) {
  // Another job, of three ranks.
  sinks_.clear();
  memory_.clear();
  Start(3);
  channel_ = Agree(Spec(2));
  Release(0, channel_);
  Register(0, Spec(3, "first"));
  Register(1, Spec(3, "second"), channel_);
  // By its name it belongs to the first one.
  const absl::Status differs = Ask(2, Spec(3, "first"), channel_);
  EXPECT_EQ(ReasonOf(differs), "LAYOUT_MISMATCH");
  EXPECT_TRUE(Says(differs, "name: 'second' on rank 1, 'first' on rank 2")) << differs;
  EXPECT_EQ(ReasonOf(Only<LayoutFailedMessage>(1).status), "LAYOUT_MISMATCH");
  EXPECT_TRUE(sink(0).messages().empty());
}

TEST_F(LayoutReleaseTest, StepThatARankHasEndedBeforeIsStillComplete) {
  DoStep(1, channel_, 2);
  Release(1, channel_);
  EXPECT_TRUE(Shared(1, channel_));  // the step needs its gradients
  Wait(kPatienceNs);
  DoStep(0, channel_, 2);
  Release(0, channel_);
  EXPECT_EQ(layouts(), 1u);
  reducer_.CompleteAll();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(Only<StepDoneMessage>(rank).record->verdict.ok());
    EXPECT_FALSE(Shared(rank, channel_));
  }
  EXPECT_EQ(layouts(), 0u);
}

TEST_F(LayoutReleaseTest, StepThatNeedsTheRankIsVoidAfterFiveSecondsAndNamesTheRank) {
  Release(1, channel_);
  Wait(10 * kPatienceNs);  // nobody waits for it
  for (std::uint64_t step = 2; step <= 3; ++step) {
    ASSERT_TRUE(job_->MarkReady(Of(0), channel_, step, {0}).ok());
    Wait(kPatienceNs - 1);
    EXPECT_TRUE(sink(0).messages().empty());
    Wait(1);
    ExpectReleasedBy(1, 0, step);
  }
}

TEST_F(LayoutReleaseTest, RunningStepWaitsFiveSecondsFromTheRelease) {
  DoStep(0, channel_, 2);
  Wait(10 * kPatienceNs);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 2, {1}).ok());
  Release(1, channel_);
  EXPECT_TRUE(Shared(1, channel_));  // a bucket is being reduced
  Wait(kPatienceNs - 1);
  EXPECT_TRUE(sink(0).messages().empty());
  Wait(1);
  EXPECT_TRUE(sink(0).messages().empty());
  reducer_.CompleteAll();
  ExpectReleasedBy(1, 0, 2);
  EXPECT_FALSE(Shared(1, channel_));
}

TEST_F(LayoutReleaseTest, JobsOwnStepTimeoutNamesTheRankToo) {
  // Another job, whose steps may take a millisecond.
  sinks_.clear();
  memory_.clear();
  Start(2);
  channel_ = Agree(Spec(2));
  Release(1, channel_);
  DoStep(0, channel_, 1);
  Wait(kStepTimeoutNs);
  ExpectReleasedBy(1, 0, 1);
}

// A process that leaves may destroy its layout first.
TEST_F(LayoutReleaseTest, StepGoesOnWithoutARankThatReleasesAndThenLeaves) {
  Release(1, channel_);
  DoStep(0, channel_, 2);
  Wait(kPatienceNs - 1);
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  reducer_.CompleteAll();
  const auto record = Only<StepDoneMessage>(0).record;
  EXPECT_TRUE(record->verdict.ok()) << record->verdict;
  EXPECT_EQ(record->live_ranks, 1u);
  TakeAll();
  Release(0, channel_);
  EXPECT_EQ(layouts(), 0u);
}

TEST_F(LayoutReleaseTest, LossOfARankThatHasReleasedIsALoss) {
  Release(1, channel_);
  DoStep(0, channel_, 2);
  Lose(1);
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "RANK_LOST");
}

TEST_F(LayoutReleaseTest, LayoutGoesWhenTheLastRankThatHasItLeaves) {
  Release(0, channel_);
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  EXPECT_EQ(layouts(), 0u);
}

TEST_F(LayoutReleaseTest, RankThatStaysMayReleaseAndKeepsTheLayoutForTheOthersUntilThen) {
  Release(1, channel_);
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
  EXPECT_EQ(layouts(), 1u);
  Release(0, channel_);
  EXPECT_EQ(layouts(), 0u);
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/false).ok());
  EXPECT_TRUE(Only<LeaveDoneMessage>(0).next_steps.empty());
}

TEST_F(LayoutReleaseTest, MessagesAboutAReleasedLayoutAreRefused) {
  Release(0, channel_);
  for (const absl::Status& status :
       {job_->MarkReady(Of(0), channel_, 2, {0}), job_->EndStep(Of(0), channel_, 2, ""),
        job_->FinishStep(Of(0), channel_, 2, ""), job_->AbandonStep(Of(0), channel_, 2, ""),
        job_->CheckReplaces(Of(0), channel_), job_->ReleaseLayout(Of(0), channel_)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(status, "rank 0 has released layout 'model' on channel 1")) << status;
  }
  Release(1, channel_);
  const absl::Status gone = job_->ReleaseLayout(Of(0), channel_);
  EXPECT_EQ(gone.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(gone), "UNKNOWN_CHANNEL");
  EXPECT_TRUE(Says(gone, "it was replaced or released")) << gone;
}

TEST_F(LayoutReleaseTest, OnlyAReadyLayoutThatIsNotBeingReplacedMayBeReleased) {
  EXPECT_EQ(ReasonOf(job_->ReleaseLayout(Of(0), 77)), "UNKNOWN_CHANNEL");
  const std::uint32_t pending = Register(1, Spec(1, "another"));
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const absl::Status early = job_->ReleaseLayout(Of(rank), pending);
    EXPECT_EQ(ReasonOf(early), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(early, "not ready")) << early;
  }
  Register(0, Spec(3), channel_);
  const absl::Status replacing = job_->ReleaseLayout(Of(0), channel_);
  EXPECT_EQ(ReasonOf(replacing), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(replacing, "rank 0 is replacing layout 'model'")) << replacing;
}

TEST_F(LayoutReleaseTest, ThousandLayoutsUnderOneNameOneAfterTheOther) {
  for (int i = 1; i < 256; ++i) Agree(Spec(1, "other" + std::to_string(i)));
  EXPECT_EQ(ReasonOf(Ask(0, Spec(1, "last"))), "QUOTA");
  std::uint32_t channel = channel_;
  for (int i = 0; i < 1000; ++i) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) Release(rank, channel);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_FALSE(memory(rank, channel).Shared());
      memory_[channel - 1][rank].reset();
    }
    channel = Agree(Spec(1));
  }
  EXPECT_EQ(layouts(), 256u);
}

}  // namespace
}  // namespace gradsync::daemon
