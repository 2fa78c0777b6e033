// How a layout is cut into buckets, and how two ranks' layouts are compared. Pure functions.

#ifndef DAEMON_JOB_LAYOUT_PLAN_H_
#define DAEMON_JOB_LAYOUT_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

struct Parameter {
  std::string name;
  std::vector<std::uint64_t> shape;
  DataType dtype = DataType::kUnspecified;
};

// The layout that a rank registers. The boundary has validated it: names, dtypes, caps (above 0,
// except the last bucket's), element counts that do not overflow.
struct LayoutSpec {
  std::string name;
  std::vector<Parameter> parameters;
  std::uint64_t bucket_cap_bytes = 25u << 20;
  std::uint64_t first_bucket_cap_bytes = 1u << 20;
  std::uint64_t last_bucket_cap_bytes = 0;  // 0: none
  // (dtype, elements) of each bucket; given instead of parameters.
  std::vector<std::pair<DataType, std::uint64_t>> explicit_buckets;
  ReduceOp op = ReduceOp::kAverage;
  bool on_gpu = false;  // the arenas lie on GPUs, each rank's on one of its own choice
  // The bytes of one more bucket, the last one, for the model's buffers. Buffers are summed,
  // whatever `op` is. 0: no such bucket.
  std::uint64_t buffer_bytes = 0;

  // The bucket for buffers; nullopt if the layout has none. `buckets`: how many its plan has.
  std::optional<std::size_t> BufferBucket(std::size_t buckets) const {
    if (buffer_bytes == 0) return std::nullopt;
    return buckets - 1;
  }
};

// The memory of a spec's items.
std::uint64_t BytesOf(absl::Span<const Parameter> parameters);
std::uint64_t BytesOf(const LayoutSpec& spec);

struct PlannedBucket {
  DataType dtype = DataType::kUnspecified;
  std::uint64_t count = 0;   // elements, padding between parameters included
  std::uint64_t offset = 0;  // bytes from the arena's start, a multiple of kBucketAlignment
};

struct PlannedParameter {
  std::uint32_t bucket = 0;
  std::uint64_t offset = 0;  // bytes from the arena's start, a multiple of kParameterAlignment
};

struct LayoutPlan {
  std::vector<PlannedBucket> buckets;
  std::vector<PlannedParameter> placements;  // one per parameter, in the order of registration
  std::uint64_t arena_bytes = 0;
  // On GPUs: offset of the verdicts of two steps, one float each. They follow the buckets and are
  // part of arena_bytes.
  std::uint64_t verdict_offset = 0;
  std::uint64_t fingerprint = 0;

  std::uint64_t VerdictOffset(std::uint64_t step) const {
    return verdict_offset + step % 2 * sizeof(float);
  }
};

std::uint64_t BytesOf(const LayoutPlan& plan);

// Cuts the layout into buckets. Takes parameters in reverse order of registration, because the
// backward pass tends to finish the last ones first. Fills one bucket per dtype at a time, and
// closes a bucket when the next parameter would exceed its cap: first_bucket_cap_bytes for the
// first bucket of each dtype, bucket_cap_bytes for the others. A parameter that is larger than the
// cap is a bucket of its own. Buckets are numbered in the order in which they close. Each is
// reduced as soon as every rank has marked it, whatever its number. Source: "PyTorch Distributed",
// VLDB 2020, sections 3.2.3 and 4.2 (compute_bucket_assignment_by_size).
//
// Beyond the paper: the bucket of parameter 0 is ready last, and trainers wait for its reduction,
// so it can have a smaller cap. If it is larger than last_bucket_cap_bytes, the parameters that it
// took last become a bucket of their own: as many as fit, and at least parameter 0.
//   RESOURCE_EXHAUSTED  more than `max_buckets` buckets.
absl::StatusOr<LayoutPlan> PlanLayout(const LayoutSpec& spec, std::size_t max_buckets);

// The first difference between two ranks' specs for people: "parameter 3: 'fc.weight' float32
// [10,64] on rank 0, 'fc.weight' float32 [10,32] on rank 1". Empty if they are the same.
std::string FirstDifference(const LayoutSpec& a, std::uint32_t rank_a, const LayoutSpec& b,
                            std::uint32_t rank_b);

}  // namespace gradsync::daemon

#endif  // DAEMON_JOB_LAYOUT_PLAN_H_
