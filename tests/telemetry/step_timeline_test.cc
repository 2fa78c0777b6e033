#include "daemon/telemetry/step_timeline.h"

#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

StepTimes MakeStep(std::uint64_t step, std::size_t buckets, std::size_t ranks) {
  StepTimes times;
  times.step = step;
  times.complete = step % 2 == 1;
  times.commit_ns = step * 1'000'000;
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    BucketTimes& bucket_times = times.buckets.emplace_back();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      bucket_times.ready_ns.push_back(step * 1000 + bucket * 10 + rank);
    }
    bucket_times.start_ns = step * 1000 + bucket * 10 + 8;
    bucket_times.finish_ns = step * 1000 + bucket * 10 + 9;
  }
  return times;
}

void ExpectEqual(const StepTimes& actual, const StepTimes& expected) {
  EXPECT_EQ(actual.step, expected.step);
  EXPECT_EQ(actual.complete, expected.complete);
  EXPECT_EQ(actual.commit_ns, expected.commit_ns);
  ASSERT_EQ(actual.buckets.size(), expected.buckets.size());
  for (std::size_t bucket = 0; bucket < actual.buckets.size(); ++bucket) {
    EXPECT_EQ(actual.buckets[bucket].ready_ns, expected.buckets[bucket].ready_ns);
    EXPECT_EQ(actual.buckets[bucket].start_ns, expected.buckets[bucket].start_ns);
    EXPECT_EQ(actual.buckets[bucket].finish_ns, expected.buckets[bucket].finish_ns);
  }
}

TEST(StepTimelineTest, BeginsEmpty) {
  const StepTimeline timeline(4, 2);
  EXPECT_EQ(timeline.size(), 0u);
  EXPECT_EQ(timeline.capacity(), StepTimeline::kMaxSteps);
  EXPECT_TRUE(timeline.Last(10).empty());
}

TEST(StepTimelineTest, ReturnsWhatWasAppendedOldestFirst) {
  StepTimeline timeline(3, 2);
  for (std::uint64_t step = 1; step <= 3; ++step) timeline.Append(MakeStep(step, 3, 2));
  const std::vector<StepTimes> last = timeline.Last(2);
  ASSERT_EQ(last.size(), 2u);
  ExpectEqual(last[0], MakeStep(2, 3, 2));
  ExpectEqual(last[1], MakeStep(3, 3, 2));
  EXPECT_EQ(timeline.Last(99).size(), 3u);
  EXPECT_TRUE(timeline.Last(0).empty());
}

TEST(StepTimelineTest, KeepsTheLastSixtyFour) {
  StepTimeline timeline(3, 2);
  for (std::uint64_t step = 1; step <= 150; ++step) timeline.Append(MakeStep(step, 3, 2));
  const std::vector<StepTimes> last = timeline.Last(1000);
  ASSERT_EQ(last.size(), 64u);
  for (std::size_t i = 0; i < last.size(); ++i) ExpectEqual(last[i], MakeStep(87 + i, 3, 2));
}

TEST(StepTimelineTest, ManyBucketsAndRanksKeepFewerSteps) {
  const StepTimeline timeline(1000, 8);
  EXPECT_EQ(timeline.capacity(), StepTimeline::kMaxTimestamps / (1000 * 10));
}

TEST(StepTimelineTest, OneStepIsKeptWhateverItsSize) {
  const std::size_t buckets = StepTimeline::kMaxTimestamps;
  StepTimeline timeline(buckets, 1);
  EXPECT_EQ(timeline.capacity(), 1u);
  timeline.Append(MakeStep(1, buckets, 1));
  timeline.Append(MakeStep(2, buckets, 1));
  const std::vector<StepTimes> last = timeline.Last(2);
  ASSERT_EQ(last.size(), 1u);
  ExpectEqual(last[0], MakeStep(2, buckets, 1));
}

TEST(StepTimelineTest, StepOfAnotherShapeOverwritesTheOldOneWholly) {
  StepTimeline timeline(2, 2);
  for (std::uint64_t step = 1; step <= 64; ++step) timeline.Append(MakeStep(step, 2, 2));
  timeline.Append(MakeStep(65, 1, 1));
  timeline.Append(MakeStep(66, 3, 3));
  const std::vector<StepTimes> last = timeline.Last(2);
  ASSERT_EQ(last[0].buckets.size(), 2u);
  EXPECT_EQ(last[0].buckets[0].ready_ns, (std::vector<std::uint64_t>{65'000, 0}));
  EXPECT_EQ(last[0].buckets[1].ready_ns, (std::vector<std::uint64_t>{0, 0}));
  EXPECT_EQ(last[0].buckets[1].finish_ns, 0u);
  ExpectEqual(last[1], MakeStep(66, 2, 2));
}

TEST(StepTimelineTest, LayoutWithoutBucketsKeepsVerdicts) {
  StepTimeline timeline(0, 2);
  timeline.Append(MakeStep(1, 0, 2));
  ASSERT_EQ(timeline.Last(1).size(), 1u);
  EXPECT_TRUE(timeline.Last(1)[0].complete);
}

TEST(StepTimelineTest, KeepsTheLastStepsThatFit) {
  StepTimeline timeline(2, 2);
  EXPECT_EQ(timeline.LastWithin(1 << 20), nullptr) << "there is no step";
  for (std::uint64_t step = 1; step <= 5; ++step) timeline.Append(MakeStep(step, 2, 2));
  EXPECT_EQ(timeline.bytes(), StepTimeline::BytesFor(2, 2));
  const auto all = timeline.LastWithin(1 << 20);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(all->Last(64).size(), 5u);
  EXPECT_LT(all->bytes(), timeline.bytes());
  const auto some = timeline.LastWithin(all->bytes() - 1);
  ASSERT_NE(some, nullptr);
  const std::vector<StepTimes> last = some->Last(64);
  ASSERT_EQ(last.size(), 4u);
  ExpectEqual(last[3], MakeStep(5, 2, 2));
  EXPECT_EQ(timeline.LastWithin(10), nullptr);
}

}  // namespace
}  // namespace gradsync::daemon
