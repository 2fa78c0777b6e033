// The last decided steps of one layout, bucket by bucket. Introspection.GetTimeline returns them.

#ifndef DAEMON_TELEMETRY_STEP_TIMELINE_H_
#define DAEMON_TELEMETRY_STEP_TIMELINE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gradsync::daemon {

// When things happened to one bucket in one step. CLOCK_MONOTONIC nanoseconds; 0 = did not happen.
struct BucketTimes {
  std::vector<std::uint64_t> ready_ns;  // by rank
  std::uint64_t start_ns = 0;
  std::uint64_t finish_ns = 0;
};

struct StepTimes {
  std::uint64_t step = 0;
  bool complete = false;             // false: void or in doubt
  std::uint64_t commit_ns = 0;       // of the verdict, also of a void step
  std::vector<BucketTimes> buckets;  // by index
};

// A ring of the last kMaxSteps steps. All memory is allocated at construction: at most 8 *
// kMaxTimestamps bytes (2 MiB), so a layout with many buckets and ranks keeps fewer steps. One step
// is kept even if it alone needs more. Thread-compatible.
class StepTimeline {
 public:
  static constexpr std::size_t kMaxSteps = 64;
  static constexpr std::size_t kMaxTimestamps = std::size_t{1} << 18;

  StepTimeline(std::size_t buckets, std::size_t ranks);
  // The memory of one timeline.
  static std::uint64_t BytesFor(std::size_t buckets, std::size_t ranks);
  std::uint64_t bytes() const;

  // Returns the last steps that fit `bytes`. Null if there is none, or not one fits.
  std::unique_ptr<StepTimeline> LastWithin(std::uint64_t bytes) const;

  // Replaces the oldest step by `times`; allocates nothing. Buckets and ranks beyond those given at
  // construction are ignored. Missing ones are recorded as "did not happen".
  void Append(const StepTimes& times);

  // Returns copies of the last `steps` steps, or of all steps if fewer are kept; oldest first.
  std::vector<StepTimes> Last(std::size_t steps) const;

  // The largest number of steps that are kept.
  std::size_t capacity() const { return headers_.size(); }
  std::size_t size() const;

 private:
  StepTimeline(std::size_t buckets, std::size_t ranks, std::size_t capacity);

  struct Header {
    std::uint64_t step = 0;
    bool complete = false;
    std::uint64_t commit_ns = 0;
  };

  // start, finish, then one ready per rank.
  std::size_t BucketStride() const { return ranks_ + 2; }

  const std::size_t buckets_;
  const std::size_t ranks_;
  std::vector<Header> headers_;            // slot = appended % capacity
  std::vector<std::uint64_t> timestamps_;  // slot-major, then bucket
  std::uint64_t appended_ = 0;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_TELEMETRY_STEP_TIMELINE_H_
