#include "tools/bench/allreduce_report.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/bench/quantile.h"

namespace gradsync::bench {
namespace {

using ::testing::DoubleEq;
using ::testing::HasSubstr;
using ::testing::Optional;

Score ScoreOf(Implementation implementation, const std::vector<std::int64_t>& times_us) {
  Score score;
  score.implementation = implementation;
  for (const std::int64_t time_us : times_us) {
    Turn turn;
    turn.time_ns = time_us * 1000;
    turn.cpu_ns = 2 * turn.time_ns;
    score.turns.push_back(turn);
  }
  return score;
}

TEST(QuantileTest, IsTheNearestRank) {
  const std::vector<double> samples = {5, 1, 4, 2, 3};
  EXPECT_EQ(Quantile(samples, 0.5), 3);
  EXPECT_EQ(Quantile(samples, 0.1), 1);
  EXPECT_EQ(Quantile(samples, 0.99), 5);
  EXPECT_EQ(Quantile({7}, 0.5), 7);
}

AllReduceRun RunOf(std::uint32_t ranks) {
  AllReduceRun run;
  run.ranks = ranks;
  return run;
}

// The machine becomes ten times slower halfway: pairs do not notice.
TEST(AllReduceReportTest, RatiosArePairedByIteration) {
  const std::vector<Score> scores = {
      ScoreOf(Implementation::kRoofline, {80, 80, 800, 800, 800}),
      ScoreOf(Implementation::kGradsync, {100, 100, 1000, 1000, 1000}),
      ScoreOf(Implementation::kGloo, {500, 500, 5000, 5000, 5000}),
  };
  const std::vector<AllReduceRow> rows = MakeRows(scores, 1'000'000, RunOf(4));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_THAT(rows[0].roofline_ratio_p50, Optional(DoubleEq(1.0)));
  EXPECT_THAT(rows[1].roofline_ratio_p50, Optional(DoubleEq(0.8)));
  EXPECT_THAT(rows[1].roofline_ratio_p10, Optional(DoubleEq(0.8)));
  EXPECT_DOUBLE_EQ(PairedSpeed(scores[1], scores[2]), 5.0);
  EXPECT_THAT(SpeedLine(scores, 1'000'000), HasSubstr("5.00 times as fast as gloo"));
}

TEST(AllReduceReportTest, BandwidthsAreThoseOfNcclTests) {
  const AllReduceRow row =
      MakeRows({ScoreOf(Implementation::kGloo, {100})}, 1'000'000, RunOf(4))[0];
  EXPECT_DOUBLE_EQ(row.algbw_gbps, 10.0);
  EXPECT_DOUBLE_EQ(row.busbw_gbps, 15.0);
  EXPECT_DOUBLE_EQ(row.cpu_seconds, 200e-6);
}

TEST(AllReduceReportTest, JsonHasTheAgreedKeysAlone) {
  AllReduceRun run = RunOf(2);
  run.dtype = DataType::kFloat16;
  const nlohmann::json list = ToJson(MakeRows({ScoreOf(Implementation::kGloo, {100})}, 4096, run));
  ASSERT_EQ(list.size(), 1u);
  std::set<std::string> keys;
  for (const auto& [key, value] : list[0].items()) keys.insert(key);
  EXPECT_EQ(keys, (std::set<std::string>{"impl", "bytes", "ranks", "nodes", "rate", "dtype",
                                         "time_us_p50", "time_us_p99", "algbw_gbps", "busbw_gbps",
                                         "wrong", "cpu_seconds", "roofline_ratio_p50",
                                         "roofline_ratio_p10", "wire_utilisation"}));
  EXPECT_EQ(list[0]["impl"], "gloo");
  EXPECT_EQ(list[0]["dtype"], "float16");
  EXPECT_TRUE(list[0]["roofline_ratio_p50"].is_null()) << "no roofline ran";
  EXPECT_EQ(list[0]["nodes"], 1);
  EXPECT_TRUE(list[0]["rate"].is_null());
  EXPECT_TRUE(list[0]["wire_utilisation"].is_null());
}

// Of three buffers: 4 are read and 4 written, in as long as the copies take or longer.
TEST(AllReduceReportTest, WhatAGpuMovesIsComparedWithCopies) {
  AllReduceRun run = RunOf(3);
  run.gpus = 1;
  const std::vector<AllReduceRow> rows =
      MakeRows({ScoreOf(Implementation::kRoofline, {80}), ScoreOf(Implementation::kKernels, {100})},
               1'000'000, run);
  EXPECT_THAT(rows[0].moved_gbps, Optional(DoubleEq(100)));
  EXPECT_THAT(rows[1].moved_gbps, Optional(DoubleEq(80)));
  EXPECT_THAT(MovedLine(rows), HasSubstr("kernels move 80.0 GB/s, 0.80 of what copies do"));
  EXPECT_EQ(ToJson(rows)[1]["gpus"], 1);
  EXPECT_EQ(ToJson(rows)[1]["moved_gbps"], 80);
}

// 2 nodes: each sends the whole size once, 10^6 bytes in 8 ms of 1 Gbit/s; 3: four thirds of it.
TEST(AllReduceReportTest, TheWireIsBusyWithTheFewestBytes) {
  AllReduceRun run = RunOf(4);
  run.nodes = 2;
  run.bits_per_second = 1'000'000'000;
  const std::vector<Score> scores = {ScoreOf(Implementation::kGradsync, {10'000})};
  const AllReduceRow row = MakeRows(scores, 1'000'000, run)[0];
  EXPECT_THAT(row.wire_utilisation, Optional(DoubleEq(0.8)));
  EXPECT_THAT(TableHead(run), HasSubstr("wire"));
  EXPECT_THAT(TableRow(row), HasSubstr(" 0.800 "));
  EXPECT_EQ(ToJson({row})[0]["rate"], "1gbit");
  EXPECT_EQ(ToJson({row})[0]["nodes"], 2);
  run.nodes = 3;
  EXPECT_THAT(MakeRows(scores, 750'000, run)[0].wire_utilisation, Optional(DoubleEq(0.8)));
}

}  // namespace
}  // namespace gradsync::bench
