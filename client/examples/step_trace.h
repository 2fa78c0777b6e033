// What one trainer did during one step, and when. Times are nanoseconds of CLOCK_MONOTONIC, which
// all processes of a machine share.

#ifndef CLIENT_EXAMPLES_STEP_TRACE_H_
#define CLIENT_EXAMPLES_STEP_TRACE_H_

#include <time.h>

#include <cstdint>
#include <vector>

namespace gradsync::examples {

struct BucketTrace {
  std::vector<std::uint64_t> ready_ns;  // per rank, when the daemon heard of it
  std::uint64_t start_ns = 0;           // of the reduction
  std::uint64_t finish_ns = 0;
};

struct StepTrace {
  std::uint64_t step = 0;
  bool overlapped = true;  // false: every MarkReady came after the backward pass
  // Rank 0 evaluated the model just before, so the others waited for it: no step to measure.
  bool after_evaluation = false;
  std::uint64_t begin_ns = 0;
  std::uint64_t forward_end_ns = 0;
  std::vector<std::uint64_t> layer_end_ns;  // backward pass, in its order: the last layer first
  std::vector<std::uint64_t> marked_ns;     // per bucket: MarkReady called
  std::uint64_t done_ns = 0;                // WaitStep returned
  std::uint64_t end_ns = 0;                 // parameters updated
  std::vector<BucketTrace> buckets;         // as the daemon saw them
};

inline std::uint64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_STEP_TRACE_H_
