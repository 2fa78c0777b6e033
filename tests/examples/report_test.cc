#include "client/examples/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradsync::examples {
namespace {

using ::testing::ElementsAre;

template <typename Event>
Event RoundTrip(const Event& event) {
  const std::string line = FormatReport(event);
  EXPECT_EQ(line.find('\n'), line.size() - 1) << "one line";
  const absl::StatusOr<Report> report = ParseReport(line);
  EXPECT_TRUE(report.ok()) << report.status();
  return std::get<Event>(*report);
}

TEST(ReportTest, EveryEventComesBack) {
  const JoinedReport joined = RoundTrip(JoinedReport{{{5160, {"fc4", "fc3"}}}});
  ASSERT_EQ(joined.buckets.size(), 1u);
  EXPECT_EQ(joined.buckets[0].bytes, 5160u);
  EXPECT_THAT(joined.buckets[0].parameters, ElementsAre("fc4", "fc3"));

  const ProgressReport progress = RoundTrip(ProgressReport{20, 0.5f, 93.75});
  EXPECT_EQ(progress.step, 20u);
  EXPECT_EQ(progress.loss, 0.5f);
  EXPECT_EQ(progress.accuracy, 93.75);

  StepTrace trace;
  trace.step = 7;
  trace.overlapped = false;
  trace.begin_ns = 1'000'000'000'000'000'001;  // more than a double holds
  trace.layer_end_ns = {3, 4};
  trace.marked_ns = {5, 6};
  trace.buckets = {{{8, 9}, 10, 11}};
  trace = RoundTrip(trace);
  EXPECT_EQ(trace.step, 7u);
  EXPECT_FALSE(trace.overlapped);
  EXPECT_EQ(trace.begin_ns, 1'000'000'000'000'000'001u);
  EXPECT_THAT(trace.layer_end_ns, ElementsAre(3, 4));
  EXPECT_THAT(trace.marked_ns, ElementsAre(5, 6));
  ASSERT_EQ(trace.buckets.size(), 1u);
  EXPECT_THAT(trace.buckets[0].ready_ns, ElementsAre(8, 9));
  EXPECT_EQ(trace.buckets[0].finish_ns, 11u);

  EXPECT_TRUE(RoundTrip(FinishedReport{97.5, true}).parameters_equal);
}

TEST(ReportTest, RefusesEverythingElse) {
  for (const char* line :
       {"", "hello", "{}", "[1]", "{\"event\":\"joined\"}", "{\"event\":\"other\"}",
        "{\"event\":7}", "{\"event\":\"progress\",\"step\":\"one\",\"loss\":0,\"accuracy\":0}"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseReport(line).status())) << line;
  }
}

}  // namespace
}  // namespace gradsync::examples
