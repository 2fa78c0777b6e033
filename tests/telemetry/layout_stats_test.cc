#include "daemon/telemetry/layout_stats.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

// Allows for the rounding of histograms, up to 5 %.
void ExpectLatencyUs(const LatencySnapshot& latency, double us) {
  EXPECT_NEAR(latency.p50_us, us, 0.05 * us);
  EXPECT_NEAR(latency.p99_us, us, 0.05 * us);
  EXPECT_DOUBLE_EQ(latency.max_us, us);
}

TEST(LayoutStatsTest, BeginsWithZeros) {
  const LayoutStatsSnapshot snapshot = LayoutStats(4).Snapshot();
  EXPECT_EQ(snapshot.steps_complete, 0u);
  EXPECT_EQ(snapshot.buckets_reduced, 0u);
  EXPECT_EQ(snapshot.reduce_gbps, 0.0);
  EXPECT_TRUE(snapshot.stragglers.empty());
  ExpectLatencyUs(snapshot.total, 0.0);
}

TEST(LayoutStatsTest, OneBucketGivesEachInterval) {
  LayoutStats stats(3);
  stats.RecordBucket({1'100'000, 1'000'000, 1'400'000}, 1'450'000, 1'950'000, 2'000'000);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  EXPECT_EQ(snapshot.buckets_reduced, 1u);
  EXPECT_EQ(snapshot.bytes_reduced, 2'000'000u);
  ExpectLatencyUs(snapshot.ready_skew, 400.0);
  ExpectLatencyUs(snapshot.queue, 50.0);
  ExpectLatencyUs(snapshot.reduce, 500.0);
  ExpectLatencyUs(snapshot.total, 550.0);
  EXPECT_DOUBLE_EQ(snapshot.reduce_gbps, 4.0);
}

TEST(LayoutStatsTest, StragglerIsTheLastRankWithItsDelay) {
  LayoutStats stats(4);
  for (int i = 0; i < 3; ++i) stats.RecordBucket({1000, 5000, 9000, 2000}, 9000, 9500, 8);
  stats.RecordBucket({6000, 5000, 4000, 3000}, 6000, 6500, 8);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  ASSERT_EQ(snapshot.stragglers.size(), 2u);
  EXPECT_EQ(snapshot.stragglers[0].rank, 2u);
  EXPECT_EQ(snapshot.stragglers[0].times_last, 3u);
  EXPECT_DOUBLE_EQ(snapshot.stragglers[0].behind_us_total, 12.0);
  EXPECT_EQ(snapshot.stragglers[1].rank, 0u);
  EXPECT_EQ(snapshot.stragglers[1].times_last, 1u);
  EXPECT_DOUBLE_EQ(snapshot.stragglers[1].behind_us_total, 1.0);
}

TEST(LayoutStatsTest, SingleOrSimultaneousRanksAreNotStragglers) {
  LayoutStats stats(3);
  stats.RecordBucket({1000, 5000, 5000}, 5000, 6000, 8);
  stats.RecordBucket({0, 5000, 0}, 5000, 6000, 8);
  EXPECT_TRUE(stats.Snapshot().stragglers.empty());
}

TEST(LayoutStatsTest, RanksThatDidNotTakePartAreIgnored) {
  LayoutStats stats(3);
  stats.RecordBucket({0, 7000, 9000}, 9000, 10'000, 8);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  ExpectLatencyUs(snapshot.ready_skew, 2.0);
  ASSERT_EQ(snapshot.stragglers.size(), 1u);
  EXPECT_DOUBLE_EQ(snapshot.stragglers[0].behind_us_total, 2.0);
}

TEST(LayoutStatsTest, WithoutRanksOnlyTheReductionCounts) {
  LayoutStats stats(2);
  stats.RecordBucket({0, 0}, 1000, 2000, 8);
  stats.RecordBucket({}, 1000, 2000, 8);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  EXPECT_EQ(snapshot.buckets_reduced, 2u);
  ExpectLatencyUs(snapshot.reduce, 1.0);
  ExpectLatencyUs(snapshot.queue, 0.0);
}

TEST(LayoutStatsTest, RanksBeyondTheWorldAndNegativeIntervalsAreTolerated) {
  LayoutStats stats(2);
  stats.RecordBucket({1000, 3000, 90'000}, 2000, 1500, 8);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  ExpectLatencyUs(snapshot.ready_skew, 2.0);
  ExpectLatencyUs(snapshot.queue, 0.0);
  ExpectLatencyUs(snapshot.total, 0.0);
  EXPECT_EQ(snapshot.reduce_gbps, 0.0);
}

TEST(LayoutStatsTest, OnlyCompleteStepsCountAsExposed) {
  LayoutStats stats(2);
  stats.RecordStep(true, 1'000'000, 1'250'000);
  stats.RecordStep(false, 1'000'000, 9'000'000);
  stats.RecordStep(true, 0, 9'000'000);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  EXPECT_EQ(snapshot.steps_complete, 2u);
  EXPECT_EQ(snapshot.steps_void, 1u);
  ExpectLatencyUs(snapshot.exposed, 250.0);
}

TEST(LayoutStatsTest, GradientStatsAreTheLastStepsAndNonFiniteStepsAreCounted) {
  LayoutStats stats(2);
  EXPECT_EQ(stats.Snapshot().gradient_norm, 0.0);
  stats.RecordStats(25.0, 0);
  EXPECT_EQ(stats.Snapshot().gradient_norm, 5.0);
  EXPECT_EQ(stats.Snapshot().steps_non_finite, 0u);
  stats.RecordStats(std::numeric_limits<double>::quiet_NaN(), 7);
  EXPECT_TRUE(std::isnan(stats.Snapshot().gradient_norm));
  EXPECT_EQ(stats.Snapshot().non_finite, 7u);
  stats.RecordStats(4.0, 0);
  const LayoutStatsSnapshot snapshot = stats.Snapshot();
  EXPECT_EQ(snapshot.gradient_norm, 2.0);
  EXPECT_EQ(snapshot.non_finite, 0u);
  EXPECT_EQ(snapshot.steps_non_finite, 1u);
}

}  // namespace
}  // namespace gradsync::daemon
