// A multi-layer perceptron for the example: plain loops whose summation order never changes, so
// that the same inputs give the same bits in every process. Results do not depend on the compiler's
// vector width either (no -ffast-math, no contraction into fused multiply-adds: see BUILD.bazel).

#ifndef CLIENT_EXAMPLES_MLP_H_
#define CLIENT_EXAMPLES_MLP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/examples/digits_data.h"

namespace gradsync::examples {

// Fully connected layers with y = x / sqrt(1 + x^2) between them; softmax and cross-entropy at the
// end. This activation function is smooth, so that a difference in rounding stays small. At the
// kink of a ReLU it could switch a unit off. Not thread-safe.
class Mlp {
 public:
  // One layer's weights and, as the last row, its biases. In the order of the forward pass: fc1,
  // fc2, ...
  struct Parameter {
    std::string name;
    std::vector<std::uint64_t> shape;  // inputs + 1, outputs
    absl::Span<float> values;          // owned by the model
  };

  // `widths`: units per layer, from the inputs to the outputs. Initial weights depend on `seed`
  // alone.
  Mlp(std::vector<std::size_t> widths, std::uint64_t seed);
  Mlp(const Mlp&) = delete;
  Mlp& operator=(const Mlp&) = delete;

  absl::Span<const Parameter> parameters() const { return parameters_; }
  // Every parameter, one after the other.
  absl::Span<float> values() { return absl::MakeSpan(values_); }

  // Forward pass; returns the mean loss. Keeps what Backward() needs.
  float Forward(const Samples& batch);
  // Backward pass of the last Forward(), from the last layer to the first. Overwrites gradients[i]
  // with the gradient of the mean loss for parameter i, and calls written(i) right after its last
  // write, while earlier layers are still to come.
  void Backward(absl::Span<float* const> gradients,
                const std::function<void(std::size_t parameter)>& written);
  // Forward pass; returns for how many samples the model finds the label.
  std::size_t CountCorrect(const Samples& samples);

 private:
  struct Layer {
    std::size_t inputs;
    std::size_t outputs;
    const float* weights;  // of its parameter
    const float* biases;
    std::vector<float> activation;  // samples x outputs, of the last Forward()
  };

  void ComputeActivations(const Samples& batch);
  const std::vector<float>& InputOf(std::size_t layer) const;

  std::vector<float> values_;
  std::vector<Parameter> parameters_;
  std::vector<Layer> layers_;
  // The last batch, and scratch memory that is kept from step to step.
  Samples batch_;
  std::vector<float> delta_;  // d loss / d pre-activation of the current layer
  std::vector<float> next_delta_;
  std::vector<float> transposed_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_MLP_H_
