#include "daemon/telemetry/latency_histogram.h"

#include <algorithm>
#include <cmath>

namespace gradsync::daemon {
namespace {

constexpr double kNsPerUs = 1000.0;

}  // namespace

void LatencyHistogram::Record(std::uint64_t ns) {
  ++counts_[IndexOf(std::min(ns, kLimitNs))];
  ++count_;
  max_ns_ = std::max(max_ns_, ns);
}

double LatencyHistogram::QuantileUs(double q) const {
  if (count_ == 0) return 0.0;
  const double wanted = std::ceil(std::clamp(q, 0.0, 1.0) * static_cast<double>(count_));
  const std::uint64_t target = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(wanted));
  if (target >= count_) return MaxUs();
  std::uint64_t seen = 0;
  for (std::size_t index = 0; index < counts_.size(); ++index) {
    seen += counts_[index];
    if (seen >= target) {
      return std::min(MiddleNs(index), static_cast<double>(max_ns_)) / kNsPerUs;
    }
  }
  return MaxUs();
}

double LatencyHistogram::MaxUs() const { return static_cast<double>(max_ns_) / kNsPerUs; }

std::size_t LatencyHistogram::IndexOf(std::uint64_t ns) {
  if (ns < kSubBuckets) return static_cast<std::size_t>(ns);
  const int octave = 63 - __builtin_clzll(ns);
  const int shift = octave - kSubBits;
  const std::size_t sub = static_cast<std::size_t>(ns >> shift) - kSubBuckets;
  return static_cast<std::size_t>(shift + 1) * kSubBuckets + sub;
}

double LatencyHistogram::MiddleNs(std::size_t index) {
  if (index < kSubBuckets) return static_cast<double>(index);
  const std::size_t shift = index / kSubBuckets - 1;
  const std::uint64_t low = (kSubBuckets + index % kSubBuckets) << shift;
  const std::uint64_t width = std::uint64_t{1} << shift;
  return static_cast<double>(low) + static_cast<double>(width - 1) / 2.0;
}

}  // namespace gradsync::daemon
