// The messages in which a trainer registers layouts, in parts: decoded, planned, and compared with
// themselves. Each message follows its length in four bytes, little-endian.

#include <cstdint>

#include "daemon/job/layout_plan.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/request_parts.h"
#include "gradsync/v1/gradsync.pb.h"
#include "proto/gradsync/shared_memory.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::daemon {
namespace {

void CheckPlan(const LayoutSpec& spec, std::size_t max_buckets) {
  FUZZ_CHECK(FirstDifference(spec, 0, spec, 1).empty());
  const auto plan = PlanLayout(spec, max_buckets);
  if (!plan.ok()) return;
  FUZZ_CHECK(plan->buckets.size() <= max_buckets);
  FUZZ_CHECK(plan->placements.size() == spec.parameters.size());
  std::uint64_t end = 0;
  for (const PlannedBucket& bucket : plan->buckets) {
    FUZZ_CHECK(bucket.offset >= end);
    FUZZ_CHECK(bucket.offset % kBucketAlignment == 0);
    end = bucket.offset + bucket.count * ItemSize(bucket.dtype);
    FUZZ_CHECK(end >= bucket.offset && end <= plan->arena_bytes);
  }
  for (const PlannedParameter& place : plan->placements) {
    FUZZ_CHECK(place.bucket < plan->buckets.size());
    FUZZ_CHECK(place.offset >= plan->buckets[place.bucket].offset);
    FUZZ_CHECK(place.offset <= plan->arena_bytes);
  }
}

void Run(fuzz::ByteReader reader) {
  DecodeLimits limits;
  limits.parameters = 64;
  limits.buckets = 32;
  RequestParts parts;
  while (!reader.empty()) {
    std::uint32_t size = 0;
    for (int i = 0; i < 4; ++i) size |= std::uint32_t{reader.Byte()} << (8 * i);
    v1::SessionRequest request;
    if (!request.ParseFromString(reader.Bytes(size))) continue;
    if (request.has_layout_part()) parts.AddLayoutPart(request, limits, /*forward=*/false);
    if (!request.has_register_layout()) continue;
    const auto layout = parts.TakeLayout(request, limits, /*forward=*/false, 1);
    if (layout.ok()) CheckPlan(layout->spec, limits.buckets);
  }
}

}  // namespace
}  // namespace gradsync::daemon

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::daemon::Run(gradsync::fuzz::ByteReader(data, size));
  return 0;
}
