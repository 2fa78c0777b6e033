// The values of a model run: the state of the model, the gradients that a rank computes from it,
// and the state after a step. All of them can be computed without the daemon.

#ifndef TESTS_JOB_MODEL_STATE_H_
#define TESTS_JOB_MODEL_STATE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/job/layout_plan.h"

namespace gradsync::daemon {

// The halves of a bucket. Each is 8 bytes, and is read and written by itself.
inline constexpr int kHalves = 2;

// A half of a bucket, as bits.
using Half = std::uint64_t;
Half HalfOf(double value);
double ValueOf(Half half);

// What the ranks share: each rank computes it from the averages, and a replacement gets it.
struct ModelState {
  static constexpr std::size_t kWords = 5;
  static constexpr std::uint64_t kEpochBatches = 2;

  std::array<std::uint64_t, 3> parameters{};
  // The position: which data comes next.
  std::uint64_t epoch = 0, batch = 0;

  static ModelState First() { return {{12345, 6789, 1011}, 0, 0}; }
  // The hash of `parameters`.
  std::uint64_t Hash() const;
  // Steps that led to this state.
  std::uint64_t StepsDone() const { return epoch * kEpochBatches + batch; }
  // The state after a step with these averages, by bucket and half.
  ModelState After(const std::vector<std::array<Half, kHalves>>& averages) const;

  // The words that travel.
  std::array<std::uint64_t, kWords> Image() const {
    return {parameters[0], parameters[1], parameters[2], epoch, batch};
  }
  static ModelState Of(const std::array<std::uint64_t, kWords>& image) {
    return {{image[0], image[1], image[2]}, image[3], image[4]};
  }
  bool operator==(const ModelState& other) const { return Image() == other.Image(); }
};

// What `rank` writes into half a bucket. A float64 gradient is a code for (rank, position, hash of
// the state, bucket, half), times 1000 to the power of the rank. So the sum of all ranks' gradients
// shows whether a term is in it twice, not at all, or from another position or state. In the bucket
// for the model's buffers (UINT8) rank 0 writes such a code, and every other rank zeros.
Half Gradient(std::uint32_t rank, const ModelState& state, DataType dtype, std::size_t bucket,
              int half);
// What the daemon must write there.
Half Average(std::uint32_t ranks, const ModelState& state, DataType dtype, std::size_t bucket,
             int half);

// The states of a run without faults; [n] is the state after n steps.
std::vector<ModelState> StatesOfRun(std::uint32_t ranks, const LayoutPlan& plan,
                                    std::uint64_t steps);

}  // namespace gradsync::daemon

#endif  // TESTS_JOB_MODEL_STATE_H_
