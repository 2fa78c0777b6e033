#include "client/examples/reference_training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "client/examples/batch_order.h"

namespace gradsync::examples {
namespace {

class ReferenceTrainingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<Digits> digits = LoadDigits("client/examples/data/digits.csv.gz");
    ASSERT_TRUE(digits.ok()) << digits.status();
    digits_ = *digits;
    recipe_.widths = {kPixels, 32, 16, kClasses};
    recipe_.steps = 60;
  }

  std::vector<float> Train(std::size_t ranks, std::size_t shards, std::size_t nodes = 1) {
    Mlp model(recipe_.widths, recipe_.seed);
    TrainReference(digits_, recipe_, ranks, shards, nodes, &model);
    return std::vector<float>(model.values().begin(), model.values().end());
  }

  Digits digits_;
  Recipe recipe_;
};

float LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b[i]));
  return largest;
}

TEST_F(ReferenceTrainingTest, IsDeterministic) { EXPECT_EQ(Train(4, 4), Train(4, 4)); }

TEST_F(ReferenceTrainingTest, ShardsDifferFromTheWholeByRoundingOnly) {
  for (std::size_t ranks = 2; ranks <= 8; ++ranks) {
    const float difference = LargestDifference(Train(ranks, ranks), Train(ranks, 1));
    EXPECT_GT(difference, 0) << ranks << " ranks";  // it is not the same computation
    EXPECT_LT(difference, 2e-6) << ranks << " ranks";
  }
}

TEST_F(ReferenceTrainingTest, NodesDifferFromOneByTheOrderOfSumsOnly) {
  EXPECT_EQ(Train(4, 4, 4), Train(4, 4, 1)) << "one rank per node: the same order";
  const float difference = LargestDifference(Train(4, 4, 2), Train(4, 4, 1));
  EXPECT_GT(difference, 0);
  EXPECT_LT(difference, 2e-6);
}

TEST_F(ReferenceTrainingTest, TheBatchIsAMultipleOfTheRanks) {
  for (std::size_t ranks = 1; ranks <= 8; ++ranks) {
    EXPECT_EQ(recipe_.GlobalBatch(ranks) % ranks, 0u);
    EXPECT_GT(recipe_.GlobalBatch(ranks), recipe_.largest_batch - ranks);
  }
}

TEST_F(ReferenceTrainingTest, TheLearningRateFallsToZeroAlongALine) {
  EXPECT_FLOAT_EQ(recipe_.LearningRate(1), recipe_.learning_rate);
  EXPECT_FLOAT_EQ(recipe_.LearningRate(recipe_.steps), recipe_.learning_rate / 60);
}

// Ten samples, each with another label.
Samples TenSamples() {
  Samples samples;
  const std::vector<float> image(kPixels);
  for (std::uint8_t i = 0; i < 10; ++i) samples.Append(image.data(), i);
  return samples;
}

TEST(BatchOrderTest, EachPassUsesEverySampleOnceInNewOrder) {
  const Samples samples = TenSamples();
  BatchOrder order(samples, 5, 1);
  std::set<std::vector<std::uint8_t>> passes;
  for (std::uint64_t pass = 0; pass < 8; ++pass) {
    std::vector<std::uint8_t> labels;
    for (std::uint64_t batch = 0; batch < 2; ++batch) {
      const Samples part = order.Shard(1 + pass * 2 + batch, 0, 1);
      labels.insert(labels.end(), part.labels.begin(), part.labels.end());
    }
    EXPECT_EQ(std::set<std::uint8_t>(labels.begin(), labels.end()).size(), 10u);
    passes.insert(labels);
  }
  EXPECT_EQ(passes.size(), 8u);
}

TEST(BatchOrderTest, ShardsTogetherAreTheBatch) {
  const Samples samples = TenSamples();
  BatchOrder order(samples, 6, 1);
  const Samples whole = order.Shard(3, 0, 1);
  std::vector<std::uint8_t> labels;
  for (std::size_t shard = 0; shard < 3; ++shard) {
    const Samples part = order.Shard(3, shard, 3);
    EXPECT_EQ(part.size(), 2u);
    labels.insert(labels.end(), part.labels.begin(), part.labels.end());
  }
  EXPECT_EQ(labels, whole.labels);
}

TEST(BatchOrderTest, BatchDependsOnTheStepOnly) {
  const Samples samples = TenSamples();
  BatchOrder forward(samples, 5, 1);
  forward.Shard(1, 0, 1);
  forward.Shard(2, 0, 1);
  BatchOrder direct(samples, 5, 1);
  EXPECT_EQ(forward.Shard(7, 0, 1).labels, direct.Shard(7, 0, 1).labels);
  EXPECT_EQ(forward.Shard(1, 0, 1).labels, BatchOrder(samples, 5, 1).Shard(1, 0, 1).labels);
}

}  // namespace
}  // namespace gradsync::examples
