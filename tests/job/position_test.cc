// Ranks say where they are in their data, and those that differ are refused.

#include "daemon/job/position.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class PositionTest : public JobFixture {
 protected:
  PositionTest() {
    options_.on_rank_loss = OnRankLoss::kHold;
    options_.hold_timeout_ns = 1'000'000'000;
  }
  void Begin(std::uint32_t ranks) {
    Start(ranks);
    channel_ = Agree(Spec(2));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) DoStep(rank, channel_, 1);
    reducer_.CompleteAll();
    TakeAll();
  }
  absl::Status Mark(std::uint32_t rank, std::uint32_t bucket, std::optional<Position> position) {
    return job_->MarkReady(Of(rank), channel_, 2, {bucket}, position);
  }

  std::uint32_t channel_ = 0;
};

TEST_F(PositionTest, RanksAtTheSamePositionAgree) {
  Begin(2);
  EXPECT_TRUE(Mark(0, 0, Position{1, 5}).ok());
  EXPECT_TRUE(Mark(0, 1, std::nullopt).ok());
  EXPECT_TRUE(job_->EndStep(Of(0), channel_, 2, "", Position{1, 5}).ok());
  EXPECT_TRUE(job_->FinishStep(Of(1), channel_, 2, "", Position{1, 5}).ok());
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(1).record->verdict.ok());
}

TEST_F(PositionTest, LaterRankWithAnotherPositionIsRefusedByName) {
  Begin(2);
  EXPECT_TRUE(Mark(0, 0, Position{1, 5}).ok());
  const absl::Status differs = Mark(1, 0, Position{1, 6});
  EXPECT_EQ(differs.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(differs), "POSITION_MISMATCH");
  EXPECT_TRUE(Says(differs, "rank 1 is at epoch 1, batch 6, rank 0 at epoch 1, batch 5"))
      << differs;
  EXPECT_EQ(FieldOf(differs, "rank"), "1");
  EXPECT_EQ(FieldOf(differs, "other_rank"), "0");
  EXPECT_EQ(FieldOf(differs, "step"), "2");
  EXPECT_EQ(ReasonOf(job_->FinishStep(Of(1), channel_, 2, "", Position{2, 5})),
            "POSITION_MISMATCH");
}

TEST_F(PositionTest, RankThatChangesItsPositionInTheStepIsRefused) {
  Begin(2);
  EXPECT_TRUE(Mark(0, 0, Position{1, 5}).ok());
  EXPECT_TRUE(Mark(0, 1, std::nullopt).ok());
  const absl::Status differs = job_->EndStep(Of(0), channel_, 2, "", Position{1, 6});
  EXPECT_EQ(ReasonOf(differs), "POSITION_MISMATCH");
}

TEST_F(PositionTest, NextStepHasAnotherPosition) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_TRUE(job_->FinishStep(Of(rank), channel_, 2, "", Position{1, 5}).ok());
  }
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_TRUE(job_->FinishStep(Of(rank), channel_, 3, "", Position{1, 6}).ok());
  }
}

// Its next session may have to begin at another position.
TEST_F(PositionTest, LostRankTakesItsPositionAlong) {
  Begin(3);
  EXPECT_TRUE(Mark(1, 0, Position{9, 9}).ok());
  Lose(1);
  EXPECT_TRUE(Mark(0, 0, Position{1, 5}).ok());
  EXPECT_EQ(ReasonOf(Mark(2, 0, Position{9, 9})), "POSITION_MISMATCH");
}

TEST_F(PositionTest, OtherRanksKeepTheirPositionWhenOneIsLost) {
  Begin(3);
  EXPECT_TRUE(Mark(1, 0, Position{1, 5}).ok());
  EXPECT_TRUE(Mark(0, 0, Position{1, 5}).ok());
  Lose(1);
  const absl::Status differs = Mark(2, 0, Position{1, 6});
  EXPECT_TRUE(Says(differs, "rank 0 at epoch 1, batch 5")) << differs;
}

TEST_F(PositionTest, RankThatWasLostAfterItsEndStepKeepsItsPosition) {
  Begin(3);
  EXPECT_TRUE(job_->FinishStep(Of(1), channel_, 2, "", Position{1, 5}).ok());
  Lose(1);
  const absl::Status differs = Mark(0, 0, Position{1, 6});
  EXPECT_TRUE(Says(differs, "rank 1 at epoch 1, batch 5")) << differs;
}

}  // namespace
}  // namespace gradsync::daemon
