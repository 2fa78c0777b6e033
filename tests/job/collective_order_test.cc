// The ranks tell which collectives they begin, in whatever way these are carried out.

#include "daemon/job/collective_order.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

TEST(CollectiveOrderTest, SameCollectivesInTheSameOrderAgree) {
  CollectiveOrder order(3);
  for (int number = 0; number < 5; ++number) {
    for (const std::uint32_t rank : {2, 0, 1}) {
      EXPECT_FALSE(order.Begin(rank, absl::StrCat("collective ", number)).has_value());
    }
  }
}

TEST(CollectiveOrderTest, RankFarBehindIsComparedAgainWhenItHasCaughtUp) {
  CollectiveOrder order(2);
  for (std::size_t number = 0; number < CollectiveOrder::kKept + 2; ++number) {
    ASSERT_FALSE(order.Begin(0, "barrier").has_value());
  }
  // The first two are forgotten.
  EXPECT_FALSE(order.Begin(1, "broadcast").has_value());
  EXPECT_FALSE(order.Begin(1, "broadcast").has_value());
  const auto other = order.Begin(1, "broadcast");
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(other->number, 3u);
  EXPECT_EQ(other->rank, 0u);
  EXPECT_EQ(other->description, "barrier");
}

TEST(CollectiveOrderTest, DifferenceIsFoundAfterManyThatAgreed) {
  CollectiveOrder order(2);
  for (std::size_t number = 0; number < 3 * CollectiveOrder::kKept; ++number) {
    ASSERT_FALSE(order.Begin(number % 2, "barrier").has_value());
    ASSERT_FALSE(order.Begin(1 - number % 2, "barrier").has_value());
  }
  ASSERT_FALSE(order.Begin(1, "barrier").has_value());
  const auto other = order.Begin(0, "gather");
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(other->number, 3 * CollectiveOrder::kKept + 1);
  EXPECT_EQ(other->rank, 1u);
}

TEST(CollectiveOrderTest, CollectiveThatOnlyOneOfTwoRanksHasBegunIsNamed) {
  CollectiveOrder order(3);
  ASSERT_FALSE(order.Begin(0, "barrier").has_value());
  EXPECT_EQ(order.BegunBeyond(0, 1), "collective 1 (barrier)");
  EXPECT_EQ(order.BegunBeyond(1, 0), "");
  EXPECT_EQ(order.BegunBeyond(1, 2), "");
  ASSERT_FALSE(order.Begin(1, "barrier").has_value());
  EXPECT_EQ(order.BegunBeyond(0, 1), "");
  for (std::size_t number = 0; number < CollectiveOrder::kKept; ++number) {
    ASSERT_FALSE(order.Begin(1, "gather").has_value());
  }
  EXPECT_EQ(order.BegunBeyond(1, 0), "collective 2 (gather)");
  EXPECT_EQ(order.BegunBeyond(1, 2), "collective 1") << "its description is forgotten";
}

TEST(CollectiveOrderTest, RankIsBeyondAFinishedOneOnlyWithMoreCollectives) {
  CollectiveOrder order(3);
  ASSERT_FALSE(order.Begin(0, "barrier").has_value());
  EXPECT_FALSE(order.AnyIsBeyondFinished()) << "no rank has finished";
  ASSERT_FALSE(order.Begin(1, "barrier").has_value());
  order.Finish(1);
  EXPECT_FALSE(order.AnyIsBeyondFinished());
  ASSERT_FALSE(order.Begin(0, "gather").has_value());
  EXPECT_TRUE(order.AnyIsBeyondFinished());
  EXPECT_TRUE(order.IsBeyondFinished(0));
  EXPECT_FALSE(order.IsBeyondFinished(2));
  order.Finish(0);
  EXPECT_TRUE(order.AnyIsBeyondFinished()) << "rank 1 has still begun fewer";
}

using CollectiveTest = JobFixture;

TEST_F(CollectiveTest, DifferenceEndsTheJobAndNamesRanksAndCollectives) {
  Start(3);
  for (const std::uint32_t rank : {0, 1, 2}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  ASSERT_TRUE(job_->BeginCollective(Of(2), "all-reduce of 4 float32").ok());
  EXPECT_FALSE(job_->HasEnded());
  ASSERT_TRUE(job_->BeginCollective(Of(0), "all-reduce of 8 float32").ok());
  for (const std::uint32_t rank : {0, 1, 2}) {
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(end), "OPERATION_MISMATCH");
    EXPECT_EQ(FieldOf(end, "rank"), "0");
    EXPECT_EQ(FieldOf(end, "other_rank"), "2");
    EXPECT_TRUE(Says(end, "collective 2")) << end;
    EXPECT_TRUE(Says(end, "rank 2 called all-reduce of 4 float32")) << end;
    EXPECT_TRUE(Says(end, "rank 0 called all-reduce of 8 float32")) << end;
  }
}

TEST_F(CollectiveTest, RunningReductionEndsBeforeTheSessionsDo) {
  Start(2);
  const std::uint32_t channel = Agree(Spec(1));
  for (const std::uint32_t rank : {0, 1}) DoStep(rank, channel, 1);
  ASSERT_TRUE(job_->BeginCollective(Of(0), "barrier").ok());
  ASSERT_TRUE(job_->BeginCollective(Of(1), "gather").ok());
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty());
  reducer_.CompleteAll();
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "OPERATION_MISMATCH");
  ASSERT_TRUE(job_->BeginCollective(Of(0), "barrier").ok()) << "the job has ended: nothing happens";
}

}  // namespace
}  // namespace gradsync::daemon
