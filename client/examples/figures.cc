#include "client/examples/figures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gradsync::examples {
namespace {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double Milliseconds(const StepTrace& trace) {
  return static_cast<double>(trace.end_ns - trace.begin_ns) * 1e-6;
}

std::vector<StepTrace> StepOfAllRanks(const Traces& traces, std::size_t index) {
  std::vector<StepTrace> step;
  for (const std::vector<StepTrace>& rank : traces) step.push_back(rank[index]);
  return step;
}

// Indices of steps to measure.
std::vector<std::size_t> Undisturbed(const Traces& traces, bool overlapped) {
  std::size_t steps = traces.empty() ? 0 : traces[0].size();
  for (const std::vector<StepTrace>& rank : traces) steps = std::min(steps, rank.size());
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < steps; ++i) {
    const StepTrace& trace = traces[0][i];
    if (trace.overlapped == overlapped && !trace.after_evaluation) indices.push_back(i);
  }
  return indices;
}

}  // namespace

std::vector<std::string> Figures::Failures() const {
  std::vector<std::string> failures;
  if (!(test_accuracy >= kLeastAccuracy)) {
    failures.push_back(absl::StrFormat("the test accuracy is %.2f %%, below %g %%", test_accuracy,
                                       kLeastAccuracy));
  }
  if (max_difference_sharded != 0) {
    failures.push_back(absl::StrFormat(
        "the parameters differ by %g from those of one process that adds the same shards in the "
        "same order; they have to be equal bit by bit",
        max_difference_sharded));
  }
  if (!(max_difference_whole <= kLargestWholeDifference)) {
    failures.push_back(absl::StrFormat(
        "the parameters differ by %g from those of one process on the whole batches, more than %g",
        max_difference_whole, kLargestWholeDifference));
  }
  if (!unequal_ranks.empty()) {
    failures.push_back(absl::StrFormat("the parameters of rank %s are not those of rank 0",
                                       absl::StrJoin(unequal_ranks, ", ")));
  }
  return failures;
}

std::string Figures::Json() const {
  const nlohmann::ordered_json json = {
      {"nodes", nodes},
      {"ranks", ranks},
      {"test_accuracy", test_accuracy},
      {"max_difference_sharded", max_difference_sharded},
      {"max_difference_whole", max_difference_whole},
      {"steps", steps},
      {"bytes_reduced", bytes_reduced},
      {"reduce_gbps", reduce_gbps},
      {"overlap_percent", overlap_percent},
      {"step_ms", step_ms},
      {"step_ms_without_overlap", step_ms_without_overlap},
      {"failures", Failures()},
  };
  return json.dump(2) + "\n";
}

double LargestDifference(absl::Span<const float> a, absl::Span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

double Overlap(const std::vector<StepTrace>& ranks) {
  if (ranks.empty()) return 0;
  std::uint64_t last_mark = 0;
  std::uint64_t last_done = 0;
  for (const StepTrace& trace : ranks) {
    for (std::uint64_t marked : trace.marked_ns) last_mark = std::max(last_mark, marked);
    last_done = std::max(last_done, trace.done_ns);
  }
  double communication = 0;
  for (std::size_t bucket = 0; bucket < ranks[0].buckets.size(); ++bucket) {
    std::uint64_t ready = 0;
    for (const StepTrace& trace : ranks) ready = std::max(ready, trace.marked_ns[bucket]);
    const std::uint64_t finish = ranks[0].buckets[bucket].finish_ns;
    if (finish > ready) communication += static_cast<double>(finish - ready);
  }
  if (communication == 0 || last_done < last_mark) return 0;
  return std::max(0.0, 1 - static_cast<double>(last_done - last_mark) / communication);
}

double MedianOverlap(const Traces& traces) {
  std::vector<double> overlaps;
  for (std::size_t index : Undisturbed(traces, true)) {
    overlaps.push_back(Overlap(StepOfAllRanks(traces, index)));
  }
  return Median(overlaps);
}

double MedianStepMs(const Traces& traces, bool overlapped) {
  std::vector<double> times;
  for (std::size_t index : Undisturbed(traces, overlapped)) {
    for (const std::vector<StepTrace>& rank : traces) times.push_back(Milliseconds(rank[index]));
  }
  return Median(times);
}

std::vector<StepTrace> TypicalStep(const Traces& traces) {
  std::vector<std::size_t> indices = Undisturbed(traces, true);
  if (indices.empty()) return {};
  // The first steps warm caches up.
  indices.erase(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(indices.size() / 2));
  const double median_ms = MedianStepMs(traces, true);
  const double median_overlap = MedianOverlap(traces);
  const auto oddity = [&](std::size_t index) {
    const std::vector<StepTrace> step = StepOfAllRanks(traces, index);
    double odd = std::fabs(Overlap(step) - median_overlap);
    for (const StepTrace& trace : step) {
      odd += std::fabs(Milliseconds(trace) - median_ms) / std::max(median_ms, 1e-6);
    }
    return odd;
  };
  std::size_t typical = indices[0];
  double least = oddity(typical);
  for (std::size_t index : indices) {
    if (const double odd = oddity(index); odd < least) {
      typical = index;
      least = odd;
    }
  }
  return StepOfAllRanks(traces, typical);
}

}  // namespace gradsync::examples
