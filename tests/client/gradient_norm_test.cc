#include <cmath>
#include <limits>

#include "client/include/gradsync/client.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

StepResult ResultOf(const std::vector<GradientStats>& stats) {
  StepResult result;
  result.stats = stats;
  return result;
}

TEST(GradientNormTest, IsTheRootOfTheSumOverBuckets) {
  EXPECT_EQ(GradientNorm(ResultOf({{9, 0}})), 3);
  EXPECT_EQ(GradientNorm(ResultOf({{9, 0}, {0, 0}, {16, 0}})), 5);
}

TEST(GradientNormTest, IsNonFiniteIfAnElementIs) {
  EXPECT_EQ(GradientNorm(ResultOf({{9, 0}, {kInfinity, 1}})), kInfinity);
  EXPECT_TRUE(std::isnan(GradientNorm(ResultOf({{kNan, 1}, {kInfinity, 1}}))));
}

TEST(GradientNormTest, IsNanWithoutStats) { EXPECT_TRUE(std::isnan(GradientNorm(StepResult()))); }

TEST(ClipCoefficientTest, ScalesOnlyLargeNorms) {
  EXPECT_EQ(ClipCoefficient(0, 1), 1);
  EXPECT_EQ(ClipCoefficient(0.5, 1), 1);
  EXPECT_EQ(ClipCoefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(ClipCoefficient(4, 0), 0);
}

TEST(ClipCoefficientTest, NonFiniteNormGivesNanOrZero) {
  EXPECT_TRUE(std::isnan(ClipCoefficient(kNan, 1)));
  EXPECT_EQ(ClipCoefficient(kInfinity, 1), 0);
}

}  // namespace
}  // namespace gradsync
