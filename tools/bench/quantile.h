// Medians and tails.

#ifndef TOOLS_BENCH_QUANTILE_H_
#define TOOLS_BENCH_QUANTILE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace gradsync::bench {

// The smallest sample that at least the fraction `q` of all samples does not exceed (nearest rank);
// q in (0, 1], at least one sample.
inline double Quantile(std::vector<double> samples, double q) {
  const auto rank = static_cast<std::size_t>(std::ceil(q * static_cast<double>(samples.size())));
  const auto nth =
      samples.begin() + static_cast<std::ptrdiff_t>(std::max<std::size_t>(rank, 1) - 1);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_QUANTILE_H_
