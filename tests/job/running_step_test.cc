// Whose gradients a bucket has, before and after the loss of a session.

#include "daemon/job/running_step.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace gradsync::daemon {
namespace {

constexpr std::size_t kBuckets = 3;
constexpr RankSession kOther{0, 10}, kLost{1, 11}, kNext{1, 12};

class RunningStepTest : public testing::Test {
 protected:
  RunningStepTest() { step_.Begin(/*deadline_ns=*/1000); }

  // Marks the buckets below `buckets`.
  void Mark(RankSession session, std::size_t buckets) {
    for (std::size_t i = 0; i < buckets; ++i) step_.Mark(session, i, ++now_ns_);
  }

  RunningStep step_{/*number=*/5, kBuckets, /*ranks=*/2, /*parameters=*/1};
  std::uint64_t now_ns_ = 0;
};

TEST_F(RunningStepTest, MarkNamesItsSession) {
  EXPECT_EQ(step_.ReadySession(0, 1), 0u);
  Mark(kLost, 1);
  EXPECT_EQ(step_.ReadySession(0, 1), 11u);
  EXPECT_EQ(step_.ReadyRanks(0), 1u);
  EXPECT_EQ(step_.ReadyRanks(1), 0u);
  EXPECT_EQ(step_.ReadySession(0, 0), 0u);
}

TEST_F(RunningStepTest, LossTakesBackTheMarksOfBucketsThatWait) {
  Mark(kOther, kBuckets);
  Mark(kLost, 2);
  step_.Submitted(0);
  step_.Lose(1);
  EXPECT_EQ(step_.ReadySession(0, 1), 11u) << "its gradients are being reduced";
  EXPECT_EQ(step_.ReadyRanks(0), 2u);
  EXPECT_EQ(step_.ReadySession(1, 1), 0u);
  EXPECT_EQ(step_.ReadyRanks(1), 1u);
  EXPECT_EQ(step_.Times(1).ready_ns[1], 0u);
  EXPECT_FALSE(step_.Has(1));
  EXPECT_EQ(step_.FirstUnmarked(1), 0u);
  EXPECT_TRUE(step_.Has(0));
}

TEST_F(RunningStepTest, NextSessionMarksEveryBucketAndFillsThoseThatWait) {
  Mark(kOther, kBuckets);
  Mark(kLost, 2);
  step_.Submitted(0);
  step_.Lose(1);
  Mark(kNext, kBuckets);
  EXPECT_EQ(step_.FirstUnmarked(1), std::nullopt);
  EXPECT_EQ(step_.ReadySession(0, 1), 11u);
  EXPECT_EQ(step_.ReadySession(1, 1), 12u);
  for (std::size_t i = 0; i < kBuckets; ++i) EXPECT_EQ(step_.ReadyRanks(i), 2u) << i;
}

TEST_F(RunningStepTest, LossOfTheNextSessionIsAsThatOfTheFirst) {
  Mark(kLost, 1);
  step_.Lose(1);
  Mark(kNext, 2);
  step_.Lose(1);
  for (std::size_t i = 0; i < kBuckets; ++i) EXPECT_EQ(step_.ReadyRanks(i), 0u) << i;
  Mark({1, 13}, kBuckets);
  EXPECT_EQ(step_.ReadySession(0, 1), 13u);
}

TEST_F(RunningStepTest, LostSessionNeedsNoAverage) {
  for (const bool ended : {false, true}) {
    SCOPED_TRACE(ended ? "it had ended the step" : "it had not ended the step");
    RunningStep step{/*number=*/5, kBuckets, /*ranks=*/2, /*parameters=*/1};
    step.Begin(/*deadline_ns=*/1000);
    step.Mark(kOther, 0, 1);
    step.Mark(kLost, 0, 2);
    step.Submitted(0);
    step.Lose(1);
    for (std::size_t i = 0; i < kBuckets; ++i) step.Mark(kNext, i, 3);
    EXPECT_TRUE(step.NeedsAverage(kNext, 0));
    if (ended) step.End(1);
    step.Lose(1);
    EXPECT_FALSE(step.NeedsAverage(kNext, 0));
    EXPECT_EQ(step.ReadySession(1, 1), ended ? kNext.incarnation : 0);
  }
}

TEST_F(RunningStepTest, GradientsOfASessionThatEndedTheStepStay) {
  Mark(kLost, kBuckets);
  step_.End(1);
  step_.Lose(1);
  for (std::size_t i = 0; i < kBuckets; ++i) EXPECT_EQ(step_.ReadySession(i, 1), 11u) << i;
  EXPECT_TRUE(step_.Ended(1));
}

}  // namespace
}  // namespace gradsync::daemon
