// What the client library takes from a daemon and, through it, from other ranks: the plan of a
// layout, verdicts, errors, and the image of another rank's state.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "client/include/gradsync/client.h"
#include "client/src/decided_steps.h"
#include "client/src/error.h"
#include "client/src/layout_plan.h"
#include "client/src/state_image.h"
#include "gradsync/v1/gradsync.pb.h"
#include "tests/fuzz/byte_reader.h"
#include "tests/fuzz/check.h"

namespace gradsync::client {
namespace {

void CheckPlan(const std::string& bytes) {
  v1::LayoutAssigned assigned;
  if (!assigned.ParseFromString(bytes)) return;
  LayoutSpec spec;
  spec.parameters = {{"weight", {8, 4}}, {"bias", {8}}, {"scale", {}}};
  const auto plan = CheckedPlan(spec, assigned);
  if (!plan.ok()) return;
  FUZZ_CHECK(plan->gradients.size() == spec.parameters.size());
  for (const PlannedSpan& span : plan->gradients) {
    FUZZ_CHECK(span.bucket < plan->buckets.size());
    const PlannedSpan& bucket = plan->buckets[span.bucket];
    FUZZ_CHECK(span.offset >= bucket.offset);
    FUZZ_CHECK(span.offset + span.count * 4 <= bucket.offset + bucket.count * 4);
    FUZZ_CHECK(bucket.offset + bucket.count * 4 <= plan->arena_bytes);
  }
}

void CheckImage(const std::string& bytes) {
  const std::shared_ptr<std::byte> memory = NewImageMemory(bytes.size());
  if (memory == nullptr) return;
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  const auto image = ParseImage(1, memory, bytes.size());
  if (!image.ok()) return;
  // Sanitizers do not know the bounds of mapped memory.
  for (const StateImage::Item& item : image->items) {
    FUZZ_CHECK(item.data.empty() ||
               (item.data.data() >= memory.get() &&
                item.data.data() + item.data.size() <= memory.get() + bytes.size()));
  }
}

void Check(fuzz::ByteReader reader) {
  switch (reader.Below(5)) {
    case 0:
      CheckPlan(reader.Bytes(reader.left()));
      return;
    case 1: {
      v1::StepDone done;
      const std::size_t parameters = reader.Below(70);
      if (!done.ParseFromString(reader.Bytes(reader.left()))) return;
      const StepVerdict verdict = DecodeVerdict(done, parameters);
      FUZZ_CHECK(verdict.step == done.step());
      return;
    }
    case 2: {
      const int code = reader.Byte();
      const std::string message = reader.Bytes(reader.Byte());
      StatusFromTrailer(code, message, reader.Bytes(reader.left())).IgnoreError();
      return;
    }
    case 3: {
      v1::RegisterLayout message;
      if (!message.ParseFromString(reader.Bytes(reader.left()))) return;
      ValidateSpec(SpecOf(message)).IgnoreError();
      return;
    }
    default:
      CheckImage(reader.Bytes(reader.left()));
  }
}

}  // namespace
}  // namespace gradsync::client

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gradsync::client::Check(gradsync::fuzz::ByteReader(data, size));
  return 0;
}
