#include "daemon/telemetry/layout_stats.h"

#include <algorithm>
#include <cmath>

namespace gradsync::daemon {
namespace {

std::uint64_t Elapsed(std::uint64_t from_ns, std::uint64_t to_ns) {
  return to_ns > from_ns ? to_ns - from_ns : 0;
}

LatencySnapshot SnapshotOf(const LatencyHistogram& histogram) {
  return {histogram.QuantileUs(0.50), histogram.QuantileUs(0.99), histogram.MaxUs()};
}

}  // namespace

LayoutStats::LayoutStats(std::size_t world_size) : lateness_(world_size) {}

void LayoutStats::RecordBucket(absl::Span<const std::uint64_t> ready_ns, std::uint64_t start_ns,
                               std::uint64_t finish_ns, std::uint64_t bytes) {
  std::uint64_t first_ns = 0;
  std::uint64_t last_ns = 0;
  std::uint64_t before_last_ns = 0;
  std::size_t last_rank = 0;
  const std::size_t ranks = std::min(ready_ns.size(), lateness_.size());
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::uint64_t ns = ready_ns[rank];
    if (ns == 0) continue;
    if (first_ns == 0 || ns < first_ns) first_ns = ns;
    if (ns >= last_ns) {
      before_last_ns = last_ns;
      last_ns = ns;
      last_rank = rank;
    } else if (ns > before_last_ns) {
      before_last_ns = ns;
    }
  }

  ++buckets_reduced_;
  bytes_reduced_ += bytes;
  reduce_ns_ += Elapsed(start_ns, finish_ns);
  reduce_.Record(Elapsed(start_ns, finish_ns));
  if (last_ns == 0) return;
  ready_skew_.Record(last_ns - first_ns);
  queue_.Record(Elapsed(last_ns, start_ns));
  total_.Record(Elapsed(last_ns, finish_ns));
  // If two ranks arrive last at the same time, neither is late.
  if (before_last_ns != 0 && before_last_ns < last_ns) {
    ++lateness_[last_rank].times_last;
    lateness_[last_rank].behind_ns += last_ns - before_last_ns;
  }
}

void LayoutStats::RecordStep(bool complete, std::uint64_t last_ready_ns, std::uint64_t commit_ns) {
  if (!complete) {
    ++steps_void_;
    return;
  }
  ++steps_complete_;
  if (last_ready_ns != 0) exposed_.Record(Elapsed(last_ready_ns, commit_ns));
}

void LayoutStats::RecordStats(double sum_of_squares, std::uint64_t non_finite) {
  sum_of_squares_ = sum_of_squares;
  non_finite_ = non_finite;
  if (non_finite > 0) ++steps_non_finite_;
}

LayoutStatsSnapshot LayoutStats::Snapshot() const {
  LayoutStatsSnapshot snapshot;
  snapshot.steps_complete = steps_complete_;
  snapshot.steps_void = steps_void_;
  snapshot.buckets_reduced = buckets_reduced_;
  snapshot.bytes_reduced = bytes_reduced_;
  snapshot.ready_skew = SnapshotOf(ready_skew_);
  snapshot.queue = SnapshotOf(queue_);
  snapshot.reduce = SnapshotOf(reduce_);
  snapshot.total = SnapshotOf(total_);
  snapshot.exposed = SnapshotOf(exposed_);
  // Bytes per nanosecond are GB/s.
  if (reduce_ns_ != 0) {
    snapshot.reduce_gbps = static_cast<double>(bytes_reduced_) / static_cast<double>(reduce_ns_);
  }
  snapshot.gradient_norm = std::sqrt(sum_of_squares_);
  snapshot.non_finite = non_finite_;
  snapshot.steps_non_finite = steps_non_finite_;
  for (std::size_t rank = 0; rank < lateness_.size(); ++rank) {
    const Lateness& late = lateness_[rank];
    if (late.times_last == 0) continue;
    snapshot.stragglers.push_back({static_cast<std::uint32_t>(rank), late.times_last,
                                   static_cast<double>(late.behind_ns) / 1000.0});
  }
  std::stable_sort(snapshot.stragglers.begin(), snapshot.stragglers.end(),
                   [](const StragglerSnapshot& a, const StragglerSnapshot& b) {
                     return a.times_last > b.times_last;
                   });
  return snapshot;
}

}  // namespace gradsync::daemon
