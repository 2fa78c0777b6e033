#include "client/examples/mlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "client/examples/random.h"
#include "client/examples/sgd.h"

namespace gradsync::examples {
namespace {

using ::testing::ElementsAre;

Samples RandomSamples(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  Samples samples;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<float> image(kPixels);
    for (float& pixel : image) pixel = random.NextSymmetric();
    samples.Append(image.data(), static_cast<std::uint8_t>(random.NextBelow(kClasses)));
  }
  return samples;
}

struct Gradients {
  explicit Gradients(const Mlp& model) {
    for (const Mlp::Parameter& parameter : model.parameters()) {
      // The old content of the memory must not matter.
      values.emplace_back(parameter.values.size(), 1e30f);
    }
    for (std::vector<float>& gradient : values) views.push_back(gradient.data());
  }
  std::vector<std::vector<float>> values;
  std::vector<float*> views;
};

TEST(MlpTest, NamesItsParametersInTheOrderOfTheForwardPass) {
  const Mlp model({kPixels, 6, kClasses}, 1);
  ASSERT_EQ(model.parameters().size(), 2u);
  EXPECT_EQ(model.parameters()[0].name, "fc1");
  EXPECT_THAT(model.parameters()[0].shape, ElementsAre(kPixels + 1, 6));
  EXPECT_EQ(model.parameters()[1].name, "fc2");
  EXPECT_THAT(model.parameters()[1].shape, ElementsAre(7, kClasses));
}

TEST(MlpTest, GradientsAreThoseOfFiniteDifferences) {
  Mlp model({kPixels, 7, 5, kClasses}, 3);
  for (float& value : model.values()) value += 0.01f;  // biases too are not zero
  const Samples batch = RandomSamples(9, 4);           // not a multiple of the rows of a block
  Gradients gradients(model);
  model.Forward(batch);
  model.Backward(gradients.views, [](std::size_t) {});

  constexpr float kStep = 1e-2f;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const absl::Span<float> values = model.parameters()[i].values;
    for (std::size_t j = 0; j < values.size(); ++j) {
      const float value = values[j];
      values[j] = value + kStep;
      const float above = model.Forward(batch);
      values[j] = value - kStep;
      const float below = model.Forward(batch);
      values[j] = value;
      EXPECT_NEAR(gradients.values[i][j], (above - below) / (2 * kStep), 2e-4)
          << model.parameters()[i].name << "[" << j << "]";
    }
  }
}

TEST(MlpTest, ReportsEachGradientWhenWrittenLastLayerFirst) {
  Mlp model({kPixels, 7, 5, kClasses}, 3);
  const Samples batch = RandomSamples(8, 4);
  Gradients expected(model);
  model.Forward(batch);
  model.Backward(expected.views, [](std::size_t) {});

  Gradients gradients(model);
  std::vector<std::size_t> order;
  model.Forward(batch);
  model.Backward(gradients.views, [&](std::size_t parameter) {
    order.push_back(parameter);
    EXPECT_EQ(gradients.values[parameter], expected.values[parameter]);
    // From here on the gradient belongs to somebody else.
    for (float& value : gradients.values[parameter]) value = NAN;
  });
  EXPECT_THAT(order, ElementsAre(2, 1, 0));
}

TEST(MlpTest, LossDoesNotDependOnTheBatch) {
  Mlp model({kPixels, 16, kClasses}, 5);
  const Samples batch = RandomSamples(11, 6);
  float sum = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    Samples one;
    one.Append(&batch.pixels[i * kPixels], batch.labels[i]);
    sum += model.Forward(one);
  }
  EXPECT_FLOAT_EQ(sum / 11, model.Forward(batch));
}

TEST(MlpTest, TheSeedDecidesEveryBit) {
  Mlp a({kPixels, 16, kClasses}, 5);
  Mlp b({kPixels, 16, kClasses}, 5);
  Mlp c({kPixels, 16, kClasses}, 6);
  EXPECT_EQ(a.values(), b.values());
  EXPECT_NE(a.values(), c.values());
}

TEST(MlpTest, FitsAFewSamples) {
  Mlp model({kPixels, 32, kClasses}, 5);
  const Samples batch = RandomSamples(20, 6);
  Gradients gradients(model);
  const std::vector<const float*> views(gradients.views.begin(), gradients.views.end());
  Sgd sgd(model.parameters(), 0.9f);
  for (int i = 0; i < 100; ++i) {
    model.Forward(batch);
    model.Backward(gradients.views, [](std::size_t) {});
    sgd.Step(model.parameters(), views, 0.1f);
  }
  EXPECT_EQ(model.CountCorrect(batch), batch.size());
  EXPECT_LT(model.Forward(batch), 0.01f);
}

TEST(SgdTest, KeepsTheMomentum) {
  Mlp model({1, 1}, 1);
  const float before = model.values()[0];
  Sgd sgd(model.parameters(), 0.5f);
  const float gradient[] = {1, 0};  // of the weight and the bias
  sgd.Step(model.parameters(), {gradient}, 0.25f);
  EXPECT_FLOAT_EQ(model.values()[0], before - 0.25f);
  sgd.Step(model.parameters(), {gradient}, 0.25f);
  EXPECT_FLOAT_EQ(model.values()[0], before - 0.25f - 0.25f * 1.5f);
  EXPECT_EQ(model.values()[1], 0.0f);
}

}  // namespace
}  // namespace gradsync::examples
