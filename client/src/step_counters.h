// Counts the marks and verdicts of one layout's steps.

#ifndef CLIENT_SRC_STEP_COUNTERS_H_
#define CLIENT_SRC_STEP_COUNTERS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "client/src/connection.h"
#include "client/src/layout_plan.h"
#include "client/src/step_progress.h"

namespace gradsync::client {

// Adds to the session's counters, which outlive this object. Thread-compatible.
class StepCounters {
 public:
  StepCounters(const LayoutPlan& plan, SessionCounters* counters);

  // A call that began at `start` has marked `marks` buckets.
  void CountMarks(std::uint64_t step, std::size_t marks, absl::Time start);
  // The exposed time is counted from the step's last mark, whatever the verdict.
  void CountVerdict(std::uint64_t step, bool complete);

 private:
  SessionCounters& counters_;
  std::uint64_t reduced_bytes_ = 0;  // of a complete step
  // When a step's last bucket was marked, by step % kMaxOutstanding; the infinite past: no mark.
  std::array<absl::Time, StepProgress::kMaxOutstanding> last_marks_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_STEP_COUNTERS_H_
