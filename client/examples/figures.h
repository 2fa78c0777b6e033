// What a run measured, and whether it is what it has to be.

#ifndef CLIENT_EXAMPLES_FIGURES_H_
#define CLIENT_EXAMPLES_FIGURES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/examples/step_trace.h"

namespace gradsync::examples {

inline constexpr double kLeastAccuracy = 96.0;  // percent
inline constexpr double kLargestWholeDifference = 1e-5;

struct Figures {
  std::uint64_t nodes = 1;
  std::uint64_t ranks = 0;   // on all nodes
  double test_accuracy = 0;  // percent
  // Of final parameters: one process, same shards, added in the order of ranks and nodes.
  double max_difference_sharded = 0;
  double max_difference_whole = 0;  // one process, whole batches
  std::uint64_t steps = 0;
  std::uint64_t bytes_reduced = 0;  // of one rank's gradients
  double reduce_gbps = 0;           // 1e9 bytes/s
  double overlap_percent = 0;
  double step_ms = 0;  // median
  double step_ms_without_overlap = 0;
  std::vector<std::uint64_t> unequal_ranks;  // whose parameters are not rank 0's

  // What is not as it has to be, in words. Empty: all is well.
  std::vector<std::string> Failures() const;
  std::string Json() const;
};

// The largest absolute difference; infinite if the sizes differ or a value is not a number.
double LargestDifference(absl::Span<const float> a, absl::Span<const float> b);

// One step, as each rank traced it: max(0, 1 - exposed / sum over buckets of (last MarkReady ->
// reduced)), where exposed is the time from the last MarkReady of all to the last rank's StepDone.
// 0..1.
double Overlap(const std::vector<StepTrace>& ranks);

// Traces of many steps, by rank: traces[rank][i] is of the same step for every rank.
using Traces = std::vector<std::vector<StepTrace>>;

// Medians over the steps with (or without) overlap that no evaluation disturbed. 0 if there are
// none.
double MedianOverlap(const Traces& traces);
double MedianStepMs(const Traces& traces, bool overlapped);

// Rank by rank, an overlapped step of middling length. Empty if there is none.
std::vector<StepTrace> TypicalStep(const Traces& traces);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_FIGURES_H_
