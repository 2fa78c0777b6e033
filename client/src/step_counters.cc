#include "client/src/step_counters.h"

#include <atomic>

#include "absl/time/clock.h"

namespace gradsync::client {

StepCounters::StepCounters(const LayoutPlan& plan, SessionCounters* counters)
    : counters_(*counters) {
  for (const PlannedSpan& bucket : plan.buckets) {
    reduced_bytes_ += bucket.count * ItemSize(bucket.dtype);
  }
  last_marks_.fill(absl::InfinitePast());
}

void StepCounters::CountMarks(std::uint64_t step, std::size_t marks, absl::Time start) {
  const absl::Time now = absl::Now();
  last_marks_[step % last_marks_.size()] = now;
  counters_.buckets_marked.fetch_add(marks, std::memory_order_relaxed);
  counters_.mark_ready_ns.fetch_add(absl::ToInt64Nanoseconds(now - start),
                                    std::memory_order_relaxed);
}

void StepCounters::CountVerdict(std::uint64_t step, bool complete) {
  if (complete) {
    counters_.steps_complete.fetch_add(1, std::memory_order_relaxed);
    counters_.bytes_reduced.fetch_add(reduced_bytes_, std::memory_order_relaxed);
  } else {
    counters_.steps_void.fetch_add(1, std::memory_order_relaxed);
  }
  if (absl::Time& mark = last_marks_[step % last_marks_.size()]; mark != absl::InfinitePast()) {
    counters_.exposed_ns.fetch_add(absl::ToInt64Nanoseconds(absl::Now() - mark),
                                   std::memory_order_relaxed);
    mark = absl::InfinitePast();
  }
}

}  // namespace gradsync::client
