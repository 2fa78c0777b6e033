// Statistics of one layout's steps so far: latencies of its buckets, bandwidth, and the ranks that
// made others wait. Introspection.GetStats returns them.

#ifndef DAEMON_TELEMETRY_LAYOUT_STATS_H_
#define DAEMON_TELEMETRY_LAYOUT_STATS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "daemon/telemetry/latency_histogram.h"

namespace gradsync::daemon {

// Microseconds.
struct LatencySnapshot {
  double p50_us = 0.0;
  double p99_us = 0.0;
  double max_us = 0.0;
};

struct StragglerSnapshot {
  std::uint32_t rank = 0;
  // Buckets for which this rank alone was the last to be ready.
  std::uint64_t times_last = 0;
  // For those buckets: by how much this rank came after the one before it, added up.
  double behind_us_total = 0.0;
};

struct LayoutStatsSnapshot {
  std::uint64_t steps_complete = 0;
  std::uint64_t steps_void = 0;
  std::uint64_t buckets_reduced = 0;
  // Sizes of these buckets in one rank's arena, added up.
  std::uint64_t bytes_reduced = 0;
  LatencySnapshot ready_skew;  // first rank's BucketReady to the last rank's
  LatencySnapshot queue;       // last rank's BucketReady to the start of the reduction
  LatencySnapshot reduce;      // the reduction itself
  LatencySnapshot total;       // last rank's BucketReady to done
  LatencySnapshot exposed;     // last BucketReady of a complete step to its commit
  // bytes_reduced / sum of the buckets' reduce times, in 10^9 bytes per second.
  double reduce_gbps = 0.0;
  // L2 norm of the last complete step's result, over all buckets. NaN or Inf if an element is.
  double gradient_norm = 0.0;
  std::uint64_t non_finite = 0;  // elements that are NaN or Inf
  // Complete steps whose result had such elements.
  std::uint64_t steps_non_finite = 0;
  // Ranks that were last at least once; the most frequent first.
  std::vector<StragglerSnapshot> stragglers;
};

// Thread-compatible: the job records and takes snapshots under its own lock. Recording allocates
// nothing; memory is 26 KiB + 16 bytes per rank.
class LayoutStats {
 public:
  explicit LayoutStats(std::size_t world_size);

  // Records the reduction of a bucket. `ready_ns`: the time of each rank's BucketReady, in rank
  // order; 0 = the rank did not take part. `bytes`: the size of one rank's bucket. All times are of
  // one clock. A negative interval counts as 0. Ranks beyond world_size are ignored. If no rank
  // took part, the latencies that include waiting are not recorded.
  void RecordBucket(absl::Span<const std::uint64_t> ready_ns, std::uint64_t start_ns,
                    std::uint64_t finish_ns, std::uint64_t bytes);

  // Records the verdict of a step, given at `commit_ns`. `last_ready_ns`: the time of the last
  // BucketReady of any rank and bucket of the step; 0 = there was none.
  void RecordStep(bool complete, std::uint64_t last_ready_ns, std::uint64_t commit_ns);

  // Records the statistics of a complete step's result, over all buckets.
  void RecordStats(double sum_of_squares, std::uint64_t non_finite);

  // Allocates; walks five histograms (some microseconds).
  LayoutStatsSnapshot Snapshot() const;

 private:
  struct Lateness {
    std::uint64_t times_last = 0;
    std::uint64_t behind_ns = 0;
  };

  std::vector<Lateness> lateness_;  // by rank
  std::uint64_t steps_complete_ = 0;
  std::uint64_t steps_void_ = 0;
  std::uint64_t buckets_reduced_ = 0;
  std::uint64_t bytes_reduced_ = 0;
  std::uint64_t reduce_ns_ = 0;
  double sum_of_squares_ = 0.0;
  std::uint64_t non_finite_ = 0;
  std::uint64_t steps_non_finite_ = 0;
  LatencyHistogram ready_skew_;
  LatencyHistogram queue_;
  LatencyHistogram reduce_;
  LatencyHistogram total_;
  LatencyHistogram exposed_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_TELEMETRY_LAYOUT_STATS_H_
