#include "client/examples/mlp.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/examples/random.h"

namespace gradsync::examples {
namespace {

// For MultiplyAdd(), in which nearly all time is spent: a second version for CPUs with wider
// vectors. Sanitizers, which check each access, would make it twenty times as slow.
#ifdef __SANITIZE_ADDRESS__
#define GRADSYNC_EXAMPLES_FAST no_sanitize("address", "undefined")
#else
#define GRADSYNC_EXAMPLES_FAST target_clones("avx2", "default")
#endif

// c += a * b, all in rows: a is m x k, b is k x n. Every element of c adds its k products in
// ascending order; the compiler makes vectors of neighbouring columns, which changes no sum.
__attribute__((GRADSYNC_EXAMPLES_FAST)) void MultiplyAdd(const float* __restrict a,
                                                         const float* __restrict b,
                                                         float* __restrict c, std::size_t m,
                                                         std::size_t k, std::size_t n) {
  // A block of four by four: each row of b is loaded once for four rows of c, and each row of c is
  // loaded and stored once for four products.
  constexpr std::size_t kBlock = 4;
  std::size_t row = 0;
  for (; row + kBlock <= m; row += kBlock) {
    float* __restrict c0 = c + row * n;
    float* __restrict c1 = c0 + n;
    float* __restrict c2 = c1 + n;
    float* __restrict c3 = c2 + n;
    const float* a0 = a + row * k;
    const float* a1 = a0 + k;
    const float* a2 = a1 + k;
    const float* a3 = a2 + k;
    std::size_t i = 0;
    for (; i + kBlock <= k; i += kBlock, a0 += kBlock, a1 += kBlock, a2 += kBlock, a3 += kBlock) {
      const float* __restrict b0 = b + i * n;
      const float* __restrict b1 = b0 + n;
      const float* __restrict b2 = b1 + n;
      const float* __restrict b3 = b2 + n;
      for (std::size_t j = 0; j < n; ++j) {
        c0[j] = c0[j] + a0[0] * b0[j] + a0[1] * b1[j] + a0[2] * b2[j] + a0[3] * b3[j];
        c1[j] = c1[j] + a1[0] * b0[j] + a1[1] * b1[j] + a1[2] * b2[j] + a1[3] * b3[j];
        c2[j] = c2[j] + a2[0] * b0[j] + a2[1] * b1[j] + a2[2] * b2[j] + a2[3] * b3[j];
        c3[j] = c3[j] + a3[0] * b0[j] + a3[1] * b1[j] + a3[2] * b2[j] + a3[3] * b3[j];
      }
    }
    for (; i < k; ++i) {
      const float* __restrict terms = b + i * n;
      for (std::size_t r = 0; r < kBlock; ++r) {
        const float factor = a[(row + r) * k + i];
        for (std::size_t j = 0; j < n; ++j) c[(row + r) * n + j] += factor * terms[j];
      }
    }
  }
  for (; row < m; ++row) {
    float* __restrict sums = c + row * n;
    for (std::size_t i = 0; i < k; ++i) {
      const float* __restrict terms = b + i * n;
      const float factor = a[row * k + i];
      for (std::size_t j = 0; j < n; ++j) sums[j] += factor * terms[j];
    }
  }
}

// to = transpose of `from`, which is rows x columns. In blocks, which fit the cache.
void Transpose(const float* __restrict from, std::size_t rows, std::size_t columns,
               std::vector<float>* to) {
  constexpr std::size_t kBlock = 16;
  to->resize(rows * columns);
  float* __restrict out = to->data();
  for (std::size_t r0 = 0; r0 < rows; r0 += kBlock) {
    for (std::size_t c0 = 0; c0 < columns; c0 += kBlock) {
      const std::size_t r1 = std::min(rows, r0 + kBlock);
      const std::size_t c1 = std::min(columns, c0 + kBlock);
      for (std::size_t c = c0; c < c1; ++c) {
        for (std::size_t r = r0; r < r1; ++r) out[c * rows + r] = from[r * columns + c];
      }
    }
  }
}

// Turns a row of scores into probabilities; returns the logarithm of the label's.
float Softmax(float* scores, std::size_t count, std::size_t label) {
  const float highest = *std::max_element(scores, scores + count);
  const float of_label = scores[label] - highest;
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    scores[i] = std::exp(scores[i] - highest);
    sum += scores[i];
  }
  for (std::size_t i = 0; i < count; ++i) scores[i] /= sum;
  return of_label - std::log(sum);
}

}  // namespace

Mlp::Mlp(std::vector<std::size_t> widths, std::uint64_t seed) {
  std::size_t total = 0;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) total += (widths[i] + 1) * widths[i + 1];
  values_.resize(total);

  Random random(seed);
  float* next = values_.data();
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    const std::size_t inputs = widths[i];
    const std::size_t outputs = widths[i + 1];
    const absl::Span<float> values(next, (inputs + 1) * outputs);
    next += values.size();
    // Keeps the variance from layer to layer. Biases begin at zero.
    const float bound = std::sqrt(6.0f / static_cast<float>(inputs));
    for (float& weight : values.first(inputs * outputs)) weight = bound * random.NextSymmetric();
    parameters_.push_back({absl::StrCat("fc", i + 1), {inputs + 1, outputs}, values});
    layers_.push_back({inputs, outputs, values.data(), values.data() + inputs * outputs, {}});
  }
}

const std::vector<float>& Mlp::InputOf(std::size_t layer) const {
  return layer == 0 ? batch_.pixels : layers_[layer - 1].activation;
}

void Mlp::ComputeActivations(const Samples& batch) {
  batch_ = batch;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    layer.activation.resize(batch.size() * layer.outputs);
    for (std::size_t s = 0; s < batch.size(); ++s) {
      std::copy_n(layer.biases, layer.outputs, &layer.activation[s * layer.outputs]);
    }
    MultiplyAdd(InputOf(i).data(), layer.weights, layer.activation.data(), batch.size(),
                layer.inputs, layer.outputs);
    if (i + 1 == layers_.size()) break;
    for (float& value : layer.activation) value /= std::sqrt(1 + value * value);
  }
}

float Mlp::Forward(const Samples& batch) {
  ComputeActivations(batch);
  const std::size_t outputs = layers_.back().outputs;
  const float samples = static_cast<float>(batch.size());
  delta_ = layers_.back().activation;
  float loss = 0;
  for (std::size_t s = 0; s < batch.size(); ++s) {
    float* scores = &delta_[s * outputs];
    loss -= Softmax(scores, outputs, batch.labels[s]);
    scores[batch.labels[s]] -= 1;  // the derivative of the loss by the scores
    for (std::size_t i = 0; i < outputs; ++i) scores[i] /= samples;
  }
  return loss / samples;
}

void Mlp::Backward(absl::Span<float* const> gradients,
                   const std::function<void(std::size_t)>& written) {
  const std::size_t samples = batch_.size();
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    float* weights = gradients[i];
    float* biases = weights + layer.inputs * layer.outputs;
    std::fill_n(weights, (layer.inputs + 1) * layer.outputs, 0.0f);
    Transpose(InputOf(i).data(), samples, layer.inputs, &transposed_);
    MultiplyAdd(transposed_.data(), delta_.data(), weights, layer.inputs, samples, layer.outputs);
    for (std::size_t s = 0; s < samples; ++s) {
      for (std::size_t j = 0; j < layer.outputs; ++j) biases[j] += delta_[s * layer.outputs + j];
    }
    written(i);

    if (i == 0) break;
    next_delta_.assign(samples * layer.inputs, 0.0f);
    Transpose(layer.weights, layer.inputs, layer.outputs, &transposed_);
    MultiplyAdd(delta_.data(), transposed_.data(), next_delta_.data(), samples, layer.outputs,
                layer.inputs);
    const std::vector<float>& input = InputOf(i);
    for (std::size_t j = 0; j < input.size(); ++j) {
      const float square = 1 - input[j] * input[j];  // dy/dx = (1 - y^2)^1.5
      next_delta_[j] *= square * std::sqrt(square);
    }
    std::swap(delta_, next_delta_);
  }
}

std::size_t Mlp::CountCorrect(const Samples& samples) {
  ComputeActivations(samples);
  const std::size_t outputs = layers_.back().outputs;
  std::size_t correct = 0;
  for (std::size_t s = 0; s < samples.size(); ++s) {
    const float* scores = &layers_.back().activation[s * outputs];
    const auto best = std::max_element(scores, scores + outputs) - scores;
    correct += best == samples.labels[s] ? 1 : 0;
  }
  return correct;
}

}  // namespace gradsync::examples
