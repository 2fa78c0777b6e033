#include "client/examples/sgd.h"

namespace gradsync::examples {

Sgd::Sgd(absl::Span<const Mlp::Parameter> parameters, float momentum) : momentum_(momentum) {
  for (const Mlp::Parameter& parameter : parameters) {
    velocities_.emplace_back(parameter.values.size(), 0.0f);
  }
}

void Sgd::Step(absl::Span<const Mlp::Parameter> parameters,
               absl::Span<const float* const> gradients, float learning_rate) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    float* __restrict values = parameters[i].values.data();
    float* __restrict velocity = velocities_[i].data();
    const float* __restrict gradient = gradients[i];
    const std::size_t count = parameters[i].values.size();
    for (std::size_t j = 0; j < count; ++j) {
      velocity[j] = momentum_ * velocity[j] + gradient[j];
      values[j] -= learning_rate * velocity[j];
    }
  }
}

}  // namespace gradsync::examples
