// Counts latencies in buckets whose width grows with the value, so that quantiles of microseconds
// and of minutes are equally precise.

#ifndef DAEMON_TELEMETRY_LATENCY_HISTOGRAM_H_
#define DAEMON_TELEMETRY_LATENCY_HISTOGRAM_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace gradsync::daemon {

// Quantiles are within 3.2 % of a recorded value up to kLimitNs (73 minutes). Longer latencies
// count as kLimitNs. The maximum is always exact. Thread-compatible; 5 KiB, allocates nothing.
class LatencyHistogram {
 public:
  static constexpr std::uint64_t kLimitNs = (std::uint64_t{1} << 42) - 1;

  void Record(std::uint64_t ns);

  std::uint64_t count() const { return count_; }
  // The q-quantile (q in 0..1) of the recorded values, in microseconds; 0 if nothing was recorded.
  // Walks the buckets: about a microsecond of work.
  double QuantileUs(double q) const;
  double MaxUs() const;

 private:
  // Each octave [2^n, 2^(n+1)) is cut into 16 equal buckets; each value below 16 has a bucket of
  // its own.
  static constexpr int kSubBits = 4;
  static constexpr std::size_t kSubBuckets = std::size_t{1} << kSubBits;
  static constexpr std::size_t kBuckets = (42 - kSubBits + 1) * kSubBuckets;

  static std::size_t IndexOf(std::uint64_t ns);
  static double MiddleNs(std::size_t index);

  std::array<std::uint64_t, kBuckets> counts_{};
  std::uint64_t count_ = 0;
  std::uint64_t max_ns_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_TELEMETRY_LATENCY_HISTOGRAM_H_
