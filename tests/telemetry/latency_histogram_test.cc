#include "daemon/telemetry/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kHourNs = 3'600'000'000'000;

TEST(LatencyHistogramTest, EmptyHistogramReturnsZero) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0u);
  EXPECT_EQ(histogram.QuantileUs(0.5), 0.0);
  EXPECT_EQ(histogram.MaxUs(), 0.0);
}

TEST(LatencyHistogramTest, OneValueIsEveryQuantile) {
  LatencyHistogram histogram;
  histogram.Record(123'456);
  for (const double q : {-1.0, 0.0, 0.5, 0.99, 1.0, 2.0}) {
    EXPECT_DOUBLE_EQ(histogram.QuantileUs(q), 123.456) << "q = " << q;
  }
}

TEST(LatencyHistogramTest, EveryValueFromOneMicrosecondToOneHourIsWithinFivePercent) {
  for (double ns = 1000.0; ns <= static_cast<double>(kHourNs); ns *= 1.013) {
    LatencyHistogram histogram;
    const auto value = static_cast<std::uint64_t>(ns);
    histogram.Record(value);
    histogram.Record(
        LatencyHistogram::kLimitNs);  // keeps the quantile from being the exact maximum
    const double exact_us = static_cast<double>(value) / 1000.0;
    EXPECT_NEAR(histogram.QuantileUs(0.5), exact_us, 0.05 * exact_us) << value << " ns";
  }
}

TEST(LatencyHistogramTest, BucketsDoNotOverlapAroundPowersOfTwo) {
  for (int bit = 1; bit < 42; ++bit) {
    const std::uint64_t power = std::uint64_t{1} << bit;
    double previous = -1.0;
    for (const std::uint64_t value : {power - 1, power, power + power / 2}) {
      LatencyHistogram histogram;
      histogram.Record(value);
      histogram.Record(LatencyHistogram::kLimitNs);
      EXPECT_GT(histogram.QuantileUs(0.5), previous) << value;
      previous = histogram.QuantileUs(0.5);
    }
  }
}

TEST(LatencyHistogramTest, QuantilesAgreeWithSortedValues) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> latency(std::log(200'000.0), 1.5);
  LatencyHistogram histogram;
  std::vector<double> sorted_us;
  for (int i = 0; i < 20'000; ++i) {
    const auto ns = static_cast<std::uint64_t>(latency(random));
    histogram.Record(ns);
    sorted_us.push_back(static_cast<double>(ns) / 1000.0);
  }
  std::sort(sorted_us.begin(), sorted_us.end());
  for (const double q : {0.01, 0.5, 0.9, 0.99, 0.999}) {
    const double exact = sorted_us[static_cast<std::size_t>(std::ceil(q * 20'000.0)) - 1];
    EXPECT_NEAR(histogram.QuantileUs(q), exact, 0.05 * exact) << "q = " << q;
  }
  EXPECT_DOUBLE_EQ(histogram.QuantileUs(1.0), sorted_us.back());
  EXPECT_EQ(histogram.count(), 20'000u);
}

TEST(LatencyHistogramTest, ValuesBeyondTheLimitKeepAnExactMaximum) {
  LatencyHistogram histogram;
  histogram.Record(0);
  histogram.Record(~std::uint64_t{0});
  histogram.Record(~std::uint64_t{0});
  EXPECT_DOUBLE_EQ(histogram.MaxUs(), static_cast<double>(~std::uint64_t{0}) / 1000.0);
  EXPECT_NEAR(histogram.QuantileUs(0.5), LatencyHistogram::kLimitNs / 1000.0,
              0.05 * LatencyHistogram::kLimitNs / 1000.0);
  EXPECT_EQ(histogram.QuantileUs(0.0), 0.0);
}

}  // namespace
}  // namespace gradsync::daemon
