#include "client/examples/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/examples/progress.h"

namespace gradsync::examples {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kMs = 1'000'000;

// Rank 1 is half a millisecond behind rank 0. One column is a tenth of a millisecond.
std::vector<StepTrace> TwoRanks() {
  std::vector<StepTrace> ranks(2);
  const std::uint64_t origin = 1000 * kMs;
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    const std::uint64_t begin = origin + rank * kMs / 2;
    StepTrace& trace = ranks[rank];
    trace.begin_ns = begin;
    trace.forward_end_ns = begin + 2 * kMs;
    trace.layer_end_ns = {begin + 2 * kMs + 1, begin + 4 * kMs};
    trace.done_ns = origin + 5 * kMs;
    trace.end_ns = origin + 6 * kMs - 1;
    trace.buckets = {
        {{origin + 2 * kMs, origin + 5 * kMs / 2}, origin + 27 * kMs / 10, origin + 29 * kMs / 10},
        {{origin + 4 * kMs, origin + 4 * kMs + 1}, origin + 4 * kMs + 2, origin + 43 * kMs / 10}};
  }
  return ranks;
}

const std::vector<BucketReport> kBuckets = {{5160, {"fc2"}}, {3u << 20, {"fc1"}}};

TEST(TimelineTest, DrawsAStep) {
  TextStyle style;
  style.unicode = false;
  style.columns = 84;
  EXPECT_EQ(DrawTimeline(TwoRanks(), kBuckets, 1, style),
            R"(                        0 ms      1         2         3         4         5
                        +---------+---------+---------+---------+---------+---------
  rank 0    computes    ffffffffffffffffffff21111111111111111111..........uuuuuuuuuu
  rank 1    computes         ffffffffffffffffffff21111111111111111111.....uuuuuuuuuu
  bucket 0  fc2 5 KiB                       0....1.##|
  bucket 1  fc1 3.0 MiB                                         +##|

  ranks:    f forward   21 backward of that layer   . wait for the step   u update
  buckets:  0..1 ready at that rank (+ several)   . wait   # reduce   | done
)");
}

TEST(TimelineTest, SaysWhereARankIs) {
  const std::string text = DrawTimeline(TwoRanks(), kBuckets, 2, TextStyle());
  EXPECT_THAT(text, HasSubstr("  rank 0    on node 0 "));
  EXPECT_THAT(text, HasSubstr("  rank 1    on node 1 "));
  EXPECT_THAT(text, HasSubstr("reduce, over all nodes"));
}

TEST(TimelineTest, ColoursWholeBars) {
  TextStyle style;
  style.color = true;
  const std::string text = DrawTimeline(TwoRanks(), kBuckets, 1, style);
  EXPECT_THAT(text, HasSubstr("\033[30;44mffff"));
  EXPECT_THAT(text, HasSubstr("✓"));
}

TEST(TimelineTest, DrawsNothingOfNothing) {
  EXPECT_EQ(DrawTimeline({}, {}, 1, TextStyle()), "");
  // A step of no length, buckets that were never reduced.
  EXPECT_THAT(DrawTimeline({StepTrace(), StepTrace()}, kBuckets, 1, TextStyle()),
              HasSubstr("rank 1"));
}

TEST(ProgressTest, SaysAFewPlainLinesWithoutATerminal) {
  Progress progress(240, TextStyle());
  int lines = 0;
  for (std::uint64_t step = 10; step <= 240; step += 10) {
    lines += progress.Update({step, 0.5f, 90}).empty() ? 0 : 1;
  }
  EXPECT_GE(lines, 5);
  EXPECT_LE(lines, 7);
  EXPECT_EQ(Progress(240, TextStyle()).Update({10, 0.5f, 90}),
            "  step 10 of 240   loss 0.5000   test accuracy 90.0 %\n");
}

TEST(ProgressTest, RedrawsABarOnATerminal) {
  TextStyle style;
  style.terminal = true;
  style.unicode = false;
  Progress progress(240, style);
  EXPECT_EQ(progress.Update({120, 0.5f, 90}),
            "\r\033[K  ================----------------  120/240   loss 0.5000   "
            "test accuracy 90.0 %");
  EXPECT_THAT(progress.Update({240, 0.5f, 90}), HasSubstr("240/240"));
  EXPECT_THAT(progress.Update({240, 0.5f, 90}), ::testing::EndsWith("\n"));
}

}  // namespace
}  // namespace gradsync::examples
