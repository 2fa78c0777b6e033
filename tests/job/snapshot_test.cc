// The lists of ranks in a job's snapshot: they stay short, however many ranks the job has.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

using Ranks = std::vector<std::uint32_t>;

class SnapshotTest : public JobFixture {};

TEST_F(SnapshotTest, ListsEveryMissingRankOfASmallJob) {
  Start(4, /*divide_by_world=*/false, kStepTimeoutNs, /*absent=*/2);
  const JobSnapshot snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.missing_ranks, (Ranks{2, 3}));
  EXPECT_EQ(snapshot.missing_ranks_total, 2u);
}

TEST_F(SnapshotTest, ListsTheLowestMissingRanksOfALargeJobAndCountsAll) {
  Start(3 * kListedRanks, /*divide_by_world=*/false, kStepTimeoutNs,
        /*absent=*/3 * kListedRanks - 1);
  const JobSnapshot snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.missing_ranks_total, 3 * kListedRanks - 1);
  ASSERT_EQ(snapshot.missing_ranks.size(), kListedRanks);
  EXPECT_EQ(snapshot.missing_ranks.front(), 1u);
  EXPECT_EQ(snapshot.missing_ranks.back(), kListedRanks);
  EXPECT_EQ(snapshot.ranks.size(), 1u);
}

// It is missing already.
TEST_F(SnapshotTest, RankThatHasNotJoinedIsNotListedAsAwaited) {
  Start(3, /*divide_by_world=*/false, kStepTimeoutNs, /*absent=*/1);
  ASSERT_TRUE(job_->Operate(Of(0), 1, OperationSpec{}, {}, kForever).ok());
  const JobSnapshot snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.waiting_ranks, Ranks{1});
  EXPECT_EQ(snapshot.missing_ranks, Ranks{2});
}

TEST_F(SnapshotTest, ListsTheLowestFormerRanksOfOtherNodes) {
  constexpr std::uint32_t kLeavers = kListedRanks + 5;
  Start(kLeavers + 1, /*divide_by_world=*/false, kStepTimeoutNs, /*absent=*/kLeavers + 1);
  for (std::uint32_t rank = 0; rank < kLeavers; ++rank) {
    const std::string node = rank == 0 ? "" : "beta";
    ASSERT_TRUE(
        job_->Join(rank, kLeavers + 1, options_, Incarnation(rank), sinks_[rank], node).ok());
    ASSERT_TRUE(job_->Leave(Of(rank), /*exit=*/true).ok());
  }
  const JobSnapshot snapshot = job_->Snapshot();
  EXPECT_TRUE(snapshot.ranks.empty());
  ASSERT_EQ(snapshot.former_ranks.size(), kListedRanks);
  EXPECT_EQ(snapshot.former_ranks.front().rank, 1u) << "rank 0 was on this node";
  EXPECT_EQ(snapshot.former_ranks.back().rank, kListedRanks);
  EXPECT_EQ(snapshot.former_ranks.back().node, "beta");
  EXPECT_EQ(snapshot.former_ranks_unlisted, 4u);
}

}  // namespace
}  // namespace gradsync::daemon
