#include "client/examples/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace gradsync::examples {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Figures Good() {
  Figures figures;
  figures.ranks = 2;
  figures.test_accuracy = 97.5;
  figures.max_difference_whole = 1e-6;
  return figures;
}

TEST(FiguresTest, SayWhatIsWrong) {
  EXPECT_THAT(Good().Failures(), IsEmpty());

  Figures figures = Good();
  figures.test_accuracy = 95.99;
  EXPECT_THAT(figures.Failures(), ElementsAre("the test accuracy is 95.99 %, below 96 %"));

  figures = Good();
  figures.max_difference_sharded = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(figures.Failures().size(), 1u);

  figures = Good();
  figures.max_difference_whole = 1.1e-5;
  EXPECT_EQ(figures.Failures().size(), 1u);

  figures = Good();
  figures.unequal_ranks = {1, 3};
  EXPECT_THAT(figures.Failures(),
              ElementsAre("the parameters of rank 1, 3 are not those of rank 0"));

  figures.test_accuracy = NAN;
  figures.max_difference_sharded = NAN;
  figures.max_difference_whole = NAN;
  EXPECT_EQ(figures.Failures().size(), 4u);
}

TEST(FiguresTest, WriteTheAgreedKeys) {
  Figures figures = Good();
  figures.bytes_reduced = 123;
  const nlohmann::json json = nlohmann::json::parse(figures.Json());
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["test_accuracy"], 97.5);
  EXPECT_EQ(json["max_difference_sharded"], 0);
  EXPECT_EQ(json["max_difference_whole"], 1e-6);
  EXPECT_EQ(json["steps"], 0);
  EXPECT_EQ(json["bytes_reduced"], 123);
  EXPECT_EQ(json["reduce_gbps"], 0);
  EXPECT_EQ(json["overlap_percent"], 0);
}

TEST(LargestDifferenceTest, NothingHides) {
  EXPECT_EQ(LargestDifference({1, 2, 3}, {1, 2, 3}), 0);
  EXPECT_EQ(LargestDifference({1, 2, 3}, {1, 4, 2}), 2);
  EXPECT_TRUE(std::isinf(LargestDifference({1, 2}, {1})));
  EXPECT_TRUE(std::isinf(LargestDifference({1, NAN, 3}, {1, 2, 3})));
  EXPECT_TRUE(std::isinf(LargestDifference({1, NAN, 3}, {1, NAN, 3})));
}

// Two buckets, marked at 100 and 200 by rank 0 and 10 later by rank 1; reduced 50 and 100 after
// that; StepDone at `done`.
std::vector<StepTrace> TwoRanks(std::uint64_t done) {
  std::vector<StepTrace> ranks(2);
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    ranks[rank].marked_ns = {100 + 10 * rank, 200 + 10 * rank};
    ranks[rank].done_ns = done - 5 * rank;
    ranks[rank].end_ns = done + 1;
    ranks[rank].buckets = {{{0, 0}, 120, 160}, {{0, 0}, 220, 310}};
  }
  return ranks;
}

TEST(OverlapTest, IsTheHiddenPartOfTheSynchronization) {
  // (160 - 110) + (310 - 210) = 150 in all, exposed 315 - 210 = 105.
  EXPECT_DOUBLE_EQ(Overlap(TwoRanks(315)), 1 - 105.0 / 150);
  EXPECT_EQ(Overlap(TwoRanks(1000)), 0);
  EXPECT_EQ(Overlap({}), 0);
}

Traces ManySteps() {
  Traces traces(2);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    std::vector<StepTrace> ranks = TwoRanks(315 + step);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      StepTrace& trace = ranks[rank];
      trace.step = step;
      trace.overlapped = step % 2 == 1;
      trace.after_evaluation = step % 10 == 1;  // 1 and 11
      trace.end_ns = trace.begin_ns + (trace.overlapped ? 1'000'000 : 2'000'000) + step * 1'000;
      if (trace.after_evaluation) trace.end_ns *= 100;
      traces[rank].push_back(trace);
    }
  }
  return traces;
}

TEST(MedianTest, LeavesOutDisturbedSteps) {
  const Traces traces = ManySteps();
  EXPECT_DOUBLE_EQ(MedianStepMs(traces, true), 1.013);  // 3 5 7 9 | 13 15 17 19
  EXPECT_DOUBLE_EQ(MedianStepMs(traces, false), 2.012);
  EXPECT_DOUBLE_EQ(MedianOverlap(traces), 1 - (105 + 9.0) / 150);
  EXPECT_EQ(MedianStepMs({}, true), 0);
  EXPECT_EQ(MedianOverlap({{}, {}}), 0);
}

TEST(TypicalStepTest, IsOfOneStepFromTheSecondHalf) {
  const std::vector<StepTrace> step = TypicalStep(ManySteps());
  ASSERT_EQ(step.size(), 2u);
  EXPECT_EQ(step[0].step, 13u);
  EXPECT_EQ(step[1].step, 13u);
  EXPECT_THAT(TypicalStep({{}, {}}), IsEmpty());
}

}  // namespace
}  // namespace gradsync::examples
