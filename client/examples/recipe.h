// What the example trains, and how. If a number here changes, the result changes, but the trainers
// and the references still agree.

#ifndef CLIENT_EXAMPLES_RECIPE_H_
#define CLIENT_EXAMPLES_RECIPE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/examples/digits_data.h"

namespace gradsync::examples {

struct Recipe {
  std::vector<std::size_t> widths = {kPixels, 384, 384, 384, 192, kClasses};  // 396,490 parameters
  std::size_t largest_batch = 128;  // samples per step, over all ranks
  std::uint64_t steps = 240;        // about 22 passes over the training samples
  float learning_rate = 0.05f;      // of the first step; falls linearly to zero
  float momentum = 0.9f;
  std::uint64_t seed = 7;

  // Every rank gets the same number of samples, so that the average over the ranks is the gradient
  // of the whole batch.
  std::size_t GlobalBatch(std::size_t ranks) const { return largest_batch / ranks * ranks; }
  float LearningRate(std::uint64_t step) const {  // of step 1..steps
    return learning_rate * static_cast<float>(steps - step + 1) / static_cast<float>(steps);
  }
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_RECIPE_H_
