#include <cmath>
#include <limits>

#include "client/include/gradsync/client.h"

namespace gradsync {

double GradientNorm(const StepResult& result) {
  if (result.stats.empty()) return std::numeric_limits<double>::quiet_NaN();
  double sum_of_squares = 0;
  for (const GradientStats& bucket : result.stats) sum_of_squares += bucket.sum_of_squares;
  return std::sqrt(sum_of_squares);
}

double ClipCoefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;  // NaN stays NaN
}

}  // namespace gradsync
