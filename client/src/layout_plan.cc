#include "client/src/layout_plan.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/src/error.h"
#include "client/src/session_options.h"
#include "client/src/utf8.h"
#include "gradsync/limits.h"
#include "gradsync/shared_memory.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

// No arena is larger, so sums of sizes do not overflow.
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 48;
constexpr std::uint64_t kVerdictBytes = 2 * sizeof(float);

absl::Status Malformed(const LayoutSpec& spec, absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                   absl::StrCat("layout '", ValidUtf8(spec.name), "': ", what));
}

// Elements of a shape, or more than kMaxElements if there are too many.
std::uint64_t ElementCount(const std::vector<std::uint64_t>& shape) {
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return 0;
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) {
    if (extent > kMaxElements / count) return kMaxElements + 1;
    count *= extent;
  }
  return count;
}

absl::Status Broken(absl::string_view what) {
  return MakeError(absl::StatusCode::kInternal, reason::kProtocolViolation,
                   absl::StrCat("the daemon sent a wrong layout: ", what,
                                "; check that gradsyncd and the client are of one release"));
}

bool Inside(const PlannedSpan& span, std::uint64_t begin, std::uint64_t end) {
  if (span.offset < begin || span.offset > end || span.count > kMaxElements) return false;
  return span.count * ItemSize(span.dtype) <= end - span.offset;
}

}  // namespace

absl::Status ValidateSpec(const LayoutSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxLayoutNameBytes ||
      !std::all_of(spec.name.begin(), spec.name.end(),
                   [](unsigned char c) { return absl::ascii_isprint(c); })) {
    return Malformed(spec, absl::StrCat("a layout's name has 1 to ", kMaxLayoutNameBytes,
                                        " printable characters"));
  }
  if (!spec.parameters.empty() && !spec.explicit_buckets.empty()) {
    return Malformed(spec, "give either parameters or explicit_buckets, not both");
  }
  if (spec.parameters.empty() && spec.explicit_buckets.empty()) {
    return Malformed(spec, "give parameters or explicit_buckets");
  }
  if (*ReduceOpName(spec.op) == '\0') {
    return Malformed(spec, "op must be sum, average, min or max");
  }
  std::uint64_t total = 0;
  absl::flat_hash_set<absl::string_view> names;
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    const std::string who =
        absl::StrCat("parameter ", i, " ('", ValidUtf8(parameter.name.substr(0, 80)), "')");
    if (parameter.name.empty() || parameter.name.size() > kMaxParameterNameBytes ||
        ValidUtf8(parameter.name) != parameter.name) {
      return Malformed(spec, absl::StrCat(who, " needs a name of 1 to ", kMaxParameterNameBytes,
                                          " bytes of UTF-8"));
    }
    if (!names.insert(parameter.name).second) {
      return Malformed(spec, absl::StrCat(who, " has the name of an earlier one"));
    }
    if (ItemSize(parameter.dtype) == 0) {
      return Malformed(spec, absl::StrCat(who, " has no dtype that gradsync reduces"));
    }
    if (const char* why = WhyRefused(spec.op, parameter.dtype, ReducedMemory::kParameters)) {
      return Malformed(spec, absl::StrCat(who, ", ", ReduceOpName(spec.op), " of ",
                                          DataTypeName(parameter.dtype), ": ", why));
    }
    if (parameter.shape.size() > kMaxDimensions) {
      return Malformed(spec, absl::StrCat(who, " has ", parameter.shape.size(),
                                          " dimensions; at most ", kMaxDimensions, " allowed"));
    }
    const std::uint64_t count = ElementCount(parameter.shape);
    if (count > kMaxElements || (total += count) > kMaxElements) {
      return Malformed(spec, absl::StrCat(who, " is too large"));
    }
  }
  for (std::size_t i = 0; i < spec.explicit_buckets.size(); ++i) {
    const BucketSpec& bucket = spec.explicit_buckets[i];
    if (ItemSize(bucket.dtype) == 0) {
      return Malformed(spec,
                       absl::StrCat("explicit bucket ", i, " has no dtype that gradsync reduces"));
    }
    const ReducedMemory memory = spec.device.empty() ? ReducedMemory::kHost : ReducedMemory::kGpu;
    if (const char* why = WhyRefused(spec.op, bucket.dtype, memory)) {
      return Malformed(spec, absl::StrCat("explicit bucket ", i, ", ", ReduceOpName(spec.op),
                                          " of ", DataTypeName(bucket.dtype), ": ", why));
    }
    if (bucket.count > kMaxElements || (total += bucket.count) > kMaxElements) {
      return Malformed(spec, absl::StrCat("explicit bucket ", i, " is too large"));
    }
  }
  if (spec.buffer_bytes > 0 && !spec.device.empty()) {
    return Malformed(spec, "buffer_bytes is for layouts in host memory");
  }
  if (spec.buffer_bytes > kMaxElements) return Malformed(spec, "buffer_bytes is too large");
  if (spec.bucket_cap_bytes == 0 || spec.first_bucket_cap_bytes == 0) {
    return Malformed(spec, "bucket_cap_bytes and first_bucket_cap_bytes must not be 0");
  }
  return absl::OkStatus();
}

void FillRegisterLayout(const LayoutSpec& spec, v1::RegisterLayout* message) {
  message->set_name(spec.name);
  for (const ParameterSpec& parameter : spec.parameters) {
    v1::Parameter& out = *message->add_parameters();
    out.set_name(parameter.name);
    for (const std::uint64_t extent : parameter.shape) out.add_shape(extent);
    out.set_dtype(static_cast<v1::DataType>(parameter.dtype));
  }
  for (const BucketSpec& bucket : spec.explicit_buckets) {
    v1::ExplicitBucket& out = *message->add_explicit_buckets();
    out.set_dtype(static_cast<v1::DataType>(bucket.dtype));
    out.set_count(bucket.count);
  }
  message->set_bucket_cap_bytes(spec.bucket_cap_bytes);
  message->set_first_bucket_cap_bytes(spec.first_bucket_cap_bytes);
  message->set_last_bucket_cap_bytes(spec.last_bucket_cap_bytes);
  message->set_op(static_cast<v1::ReduceOp>(spec.op));
  message->set_device(spec.device);
  message->set_timeout_ms(TimeoutMs(spec.timeout));
  message->set_buffer_bytes(spec.buffer_bytes);
}

LayoutSpec SpecOf(const v1::RegisterLayout& message) {
  LayoutSpec spec;
  spec.name = message.name();
  for (const v1::Parameter& parameter : message.parameters()) {
    spec.parameters.push_back({parameter.name(),
                               {parameter.shape().begin(), parameter.shape().end()},
                               static_cast<DataType>(parameter.dtype())});
  }
  for (const v1::ExplicitBucket& bucket : message.explicit_buckets()) {
    spec.explicit_buckets.push_back({static_cast<DataType>(bucket.dtype()), bucket.count()});
  }
  if (message.bucket_cap_bytes() > 0) spec.bucket_cap_bytes = message.bucket_cap_bytes();
  if (message.first_bucket_cap_bytes() > 0) {
    spec.first_bucket_cap_bytes = message.first_bucket_cap_bytes();
  }
  spec.last_bucket_cap_bytes = message.last_bucket_cap_bytes();
  if (message.op() != v1::REDUCE_OP_UNSPECIFIED) spec.op = static_cast<ReduceOp>(message.op());
  spec.buffer_bytes = message.buffer_bytes();
  return spec;
}

absl::StatusOr<LayoutPlan> CheckedPlan(const LayoutSpec& spec, const v1::LayoutAssigned& assigned) {
  LayoutPlan plan;
  if (!v1::ArenaMemory_IsValid(assigned.memory()) ||
      (assigned.memory() == v1::ARENA_MEMORY_UNSPECIFIED) != spec.device.empty()) {
    return Broken("the arena's memory");
  }
  plan.memory = static_cast<ArenaMemory>(assigned.memory());
  plan.arena_bytes = assigned.arena_bytes();
  std::uint64_t end = 0;
  for (int i = 0; i < assigned.buckets_size(); ++i) {
    const v1::Bucket& bucket = assigned.buckets(i);
    PlannedSpan span{static_cast<DataType>(bucket.dtype()), bucket.count(), bucket.offset(),
                     static_cast<std::uint32_t>(i)};
    if (ItemSize(span.dtype) == 0 || span.offset % kBucketAlignment != 0 ||
        !Inside(span, end, plan.arena_bytes)) {
      return Broken(absl::StrCat("bucket ", i));
    }
    end = span.offset + span.count * ItemSize(span.dtype);
    plan.buckets.push_back(span);
  }
  if (plan.memory != ArenaMemory::kHost) {
    plan.verdict_offset = assigned.verdict_offset();
    plan.ipc_handle = assigned.ipc_handle();
    if (plan.verdict_offset < end || plan.verdict_offset % kVerdictBytes != 0 ||
        plan.arena_bytes < kVerdictBytes ||
        plan.verdict_offset > plan.arena_bytes - kVerdictBytes) {
      return Broken("the verdict's place");
    }
  }
  if (spec.buffer_bytes > 0 &&
      (plan.buckets.empty() || plan.buckets.back().dtype != DataType::kUint8 ||
       plan.buckets.back().count != spec.buffer_bytes)) {
    return Broken("the bucket of the buffers");
  }
  if (!spec.explicit_buckets.empty()) {
    const std::size_t buffers = spec.buffer_bytes > 0 ? 1 : 0;
    if (plan.buckets.size() != spec.explicit_buckets.size() + buffers) {
      return Broken("number of buckets");
    }
    for (std::size_t i = 0; i < spec.explicit_buckets.size(); ++i) {
      if (plan.buckets[i].dtype != spec.explicit_buckets[i].dtype ||
          plan.buckets[i].count != spec.explicit_buckets[i].count) {
        return Broken(absl::StrCat("explicit bucket ", i));
      }
    }
  }
  if (static_cast<std::size_t>(assigned.placements_size()) != spec.parameters.size()) {
    return Broken("number of parameters");
  }
  for (int i = 0; i < assigned.placements_size(); ++i) {
    const v1::Placement& placement = assigned.placements(i);
    const ParameterSpec& parameter = spec.parameters[i];
    if (placement.bucket() >= plan.buckets.size()) return Broken(absl::StrCat("parameter ", i));
    const PlannedSpan& bucket = plan.buckets[placement.bucket()];
    PlannedSpan span{parameter.dtype, ElementCount(parameter.shape), placement.offset(),
                     placement.bucket()};
    if (bucket.dtype != span.dtype || span.offset % kParameterAlignment != 0 ||
        !Inside(span, bucket.offset, bucket.offset + bucket.count * ItemSize(bucket.dtype))) {
      return Broken(absl::StrCat("parameter ", i));
    }
    plan.gradients.push_back(span);
  }
  // Two parameters in one place would be averaged into each other.
  std::vector<const PlannedSpan*> order;
  for (const PlannedSpan& span : plan.gradients) {
    if (span.count > 0) order.push_back(&span);
  }
  std::sort(order.begin(), order.end(),
            [](const PlannedSpan* a, const PlannedSpan* b) { return a->offset < b->offset; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->offset + order[i - 1]->count * ItemSize(order[i - 1]->dtype) >
        order[i]->offset) {
      return Broken("two parameters overlap");
    }
  }
  return plan;
}

static_assert(static_cast<int>(ArenaMemory::kCudaIpc) == v1::ARENA_MEMORY_CUDA_IPC);
static_assert(static_cast<int>(ArenaMemory::kCudaVmm) == v1::ARENA_MEMORY_CUDA_VMM);
static_assert(static_cast<int>(DataType::kUint8) == v1::DATA_TYPE_UINT8);
static_assert(static_cast<int>(DataType::kBfloat16) == v1::DATA_TYPE_BFLOAT16);
static_assert(static_cast<int>(DataType::kFloat16) == v1::DATA_TYPE_FLOAT16);
static_assert(static_cast<int>(DataType::kFloat64) == v1::DATA_TYPE_FLOAT64);
static_assert(static_cast<int>(DataType::kFloat32) == v1::DATA_TYPE_FLOAT32);
static_assert(static_cast<int>(ReduceOp::kSum) == v1::REDUCE_OP_SUM);
static_assert(static_cast<int>(ReduceOp::kAverage) == v1::REDUCE_OP_AVERAGE);
static_assert(static_cast<int>(ReduceOp::kMin) == v1::REDUCE_OP_MIN);
static_assert(static_cast<int>(ReduceOp::kMax) == v1::REDUCE_OP_MAX);

}  // namespace gradsync::client
