// Statistics of a bucket's result. The reduction gathers them while it writes the result.

#ifndef DAEMON_REDUCE_GRADIENT_STATS_H_
#define DAEMON_REDUCE_GRADIENT_STATS_H_

#include <cstdint>

namespace gradsync::daemon {

// About the elements as they are written: scaled, and rounded to the bucket's type.
struct GradientStats {
  // NaN or Inf if an element is. Also Inf if the squares of float64 elements are too large for a
  // double (elements from 1e154).
  double sum_of_squares = 0;
  std::uint64_t non_finite = 0;  // elements that are NaN or Inf
};

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_GRADIENT_STATS_H_
