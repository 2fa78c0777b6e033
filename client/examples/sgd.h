// Stochastic gradient descent with momentum: velocity = momentum * velocity + gradient, value -=
// rate * velocity.

#ifndef CLIENT_EXAMPLES_SGD_H_
#define CLIENT_EXAMPLES_SGD_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "client/examples/mlp.h"

namespace gradsync::examples {

// The velocities of one model. Not thread-safe.
class Sgd {
 public:
  Sgd(absl::Span<const Mlp::Parameter> parameters, float momentum);

  // Updates every parameter; gradients[i] has as many elements as parameter i.
  void Step(absl::Span<const Mlp::Parameter> parameters, absl::Span<const float* const> gradients,
            float learning_rate);

 private:
  const float momentum_;
  std::vector<std::vector<float>> velocities_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_SGD_H_
