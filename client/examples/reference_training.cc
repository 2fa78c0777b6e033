#include "client/examples/reference_training.h"

#include <cstdint>
#include <vector>

#include "client/examples/batch_order.h"
#include "client/examples/sgd.h"

namespace gradsync::examples {
namespace {

// One shard's gradients, and where each parameter's begin.
struct Gradients {
  explicit Gradients(const Mlp& model) {
    std::size_t total = 0;
    for (const Mlp::Parameter& parameter : model.parameters()) total += parameter.values.size();
    values.resize(total);
    float* next = values.data();
    for (const Mlp::Parameter& parameter : model.parameters()) {
      views.push_back(next);
      next += parameter.values.size();
    }
  }

  Gradients(Gradients&&) = default;  // the views follow the memory

  std::vector<float> values;
  std::vector<float*> views;
};

// shards[to] += shards[from].
void Add(std::vector<Gradients>* shards, std::size_t to, std::size_t from) {
  std::vector<float>& sum = (*shards)[to].values;
  const std::vector<float>& values = (*shards)[from].values;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
}

// shards[0] becomes the average.
void AverageInOrder(std::vector<Gradients>* shards, std::size_t nodes) {
  const std::size_t per_node = shards->size() / nodes;
  for (std::size_t first = 0; first < shards->size(); first += per_node) {
    for (std::size_t i = 1; i < per_node; ++i) Add(shards, first, first + i);
    if (first > 0) Add(shards, 0, first);
  }
  std::vector<float>& sum = shards->front().values;
  const float scale = static_cast<float>(1.0 / static_cast<double>(shards->size()));
  for (float& value : sum) value *= scale;
}

}  // namespace

void TrainReference(const Digits& digits, const Recipe& recipe, std::size_t ranks,
                    std::size_t shards, std::size_t nodes, Mlp* model) {
  BatchOrder order(digits.train, recipe.GlobalBatch(ranks), recipe.seed);
  Sgd sgd(model->parameters(), recipe.momentum);
  std::vector<Gradients> gradients;
  for (std::size_t i = 0; i < shards; ++i) gradients.emplace_back(*model);

  for (std::uint64_t step = 1; step <= recipe.steps; ++step) {
    for (std::size_t shard = 0; shard < shards; ++shard) {
      model->Forward(order.Shard(step, shard, shards));
      model->Backward(gradients[shard].views, [](std::size_t) {});
    }
    AverageInOrder(&gradients, nodes);
    const std::vector<float*>& views = gradients.front().views;
    sgd.Step(model->parameters(), {views.data(), views.size()}, recipe.LearningRate(step));
  }
}

}  // namespace gradsync::examples
