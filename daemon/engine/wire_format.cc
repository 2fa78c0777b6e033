#include "daemon/engine/wire_format.h"

#include <algorithm>
#include <array>

#include "absl/container/inlined_vector.h"
#include "daemon/reduce/combine.h"

namespace gradsync::daemon {
namespace {

// Elements that are added up in the L1 cache.
constexpr std::size_t kBlock = 1024;

}  // namespace

const char* WireTypeName(WireType wire) {
  switch (wire) {
    case WireType::kSame:
      return "same";
    case WireType::kBfloat16:
      return "bfloat16";
    case WireType::kFloat16:
      break;
  }
  return "float16";
}

DataType WireDataType(DataType dtype, WireType wire) {
  if (dtype != DataType::kFloat32 || wire == WireType::kSame) return dtype;
  return wire == WireType::kBfloat16 ? DataType::kBfloat16 : DataType::kFloat16;
}

void Narrow(DataType wire, const float* from, std::size_t count, std::byte* to) {
  ScaleInto(wire, reinterpret_cast<const std::byte*>(from), count, 1.0, {&to, 1});
}

void Widen(DataType wire, const std::byte* from, std::size_t count, float* to) {
  SumInto(wire, {&from, 1}, count, reinterpret_cast<std::byte*>(to));
}

void SumShards(DataType wire, absl::Span<const std::byte* const> shards, std::size_t count,
               std::byte* to) {
  const std::size_t item = ItemSize(wire);
  // Elements of the work type, float32 or float64. `to` may be one of the shards, so the sum is
  // built here.
  alignas(64) std::array<std::byte, kBlock * sizeof(double)> sum;
  absl::InlinedVector<const std::byte*, 16> from(shards.size());
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t block = std::min(kBlock, count - first);
    for (std::size_t s = 0; s < shards.size(); ++s) from[s] = shards[s] + first * item;
    SumInto(wire, from, block, sum.data());
    std::byte* const written = to + first * item;
    ScaleInto(wire, sum.data(), block, 1.0, {&written, 1});
  }
}

}  // namespace gradsync::daemon
