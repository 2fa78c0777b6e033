#include "daemon/engine/wire_format.h"

#include <cstring>

// Compiles this file once per SIMD target; the loops are plain ones, which the compiler vectorizes
// for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "daemon/engine/wire_format.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gradsync {
namespace HWY_NAMESPACE {

// Elements that are added up in the L1 cache.
constexpr std::size_t kBlock = 1024;

HWY_INLINE std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
HWY_INLINE float FloatOf(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Choices are written as masks: the compiler then vectorizes them on every target.
HWY_INLINE std::uint32_t Select(bool choose, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(choose);
  return (yes & mask) | (no & ~mask);
}

struct Bfloat16 {
  static HWY_INLINE float Widen(std::uint16_t bits) {
    return FloatOf(static_cast<std::uint32_t>(bits) << 16);
  }
  static HWY_INLINE std::uint16_t Narrow(float value) {
    const std::uint32_t bits = BitsOf(value);
    const std::uint32_t kept = bits >> 16;
    const std::uint32_t rounded = (bits + 0x7FFFu + (kept & 1u)) >> 16;
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    // A NaN is made quiet: its payload may be in the dropped half alone.
    return static_cast<std::uint16_t>(Select(nan, kept | 0x40u, rounded));
  }
};

// F. Giesen's float_to_half_fast3_rtne and its inverse, without branches.
struct Float16 {
  static HWY_INLINE float Widen(std::uint16_t half) {
    const std::uint32_t magnitude = (half & 0x7FFFu) << 13;
    const std::uint32_t exponent = magnitude & (0x7C00u << 13);
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t normal = magnitude + ((127u - 15u) << 23);
    const std::uint32_t non_finite = normal + ((128u - 16u) << 23);
    const std::uint32_t subnormal = BitsOf(FloatOf(normal + (1u << 23)) - FloatOf(113u << 23));
    const std::uint32_t bits =
        Select(exponent == (0x7C00u << 13), non_finite, Select(exponent == 0, subnormal, normal));
    return FloatOf(bits | sign);
  }
  static HWY_INLINE std::uint16_t Narrow(float value) {
    constexpr std::uint32_t kSubnormalMagic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    const std::uint32_t all = BitsOf(value);
    const std::uint32_t sign = all & 0x80000000u;
    const std::uint32_t bits = all ^ sign;
    const std::uint32_t overflow = Select(bits > 0x7F800000u, 0x7E00u, 0x7C00u);
    const std::uint32_t subnormal =
        BitsOf(FloatOf(bits) + FloatOf(kSubnormalMagic)) - kSubnormalMagic;
    const std::uint32_t odd = (bits >> 13) & 1u;
    const std::uint32_t normal = (bits - ((127u - 15u) << 23) + 0xFFFu + odd) >> 13;
    const std::uint32_t half =
        Select(bits >= (143u << 23), overflow, Select(bits < (113u << 23), subnormal, normal));
    return static_cast<std::uint16_t>(half | (sign >> 16));
  }
};

template <class Half>
void NarrowAll(const float* HWY_RESTRICT from, std::size_t count, std::uint16_t* HWY_RESTRICT to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = Half::Narrow(from[i]);
}

template <class Half>
void WidenAll(const std::uint16_t* HWY_RESTRICT from, std::size_t count, float* HWY_RESTRICT to) {
  for (std::size_t i = 0; i < count; ++i) to[i] = Half::Widen(from[i]);
}

template <class Half>
void AddWidened(const std::uint16_t* HWY_RESTRICT from, std::size_t count,
                float* HWY_RESTRICT sum) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += Half::Widen(from[i]);
}

template <typename Float>
void AddAll(const Float* HWY_RESTRICT from, std::size_t count, Float* HWY_RESTRICT sum) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += from[i];
}

template <class Half>
void SumHalves(const std::byte* const* shards, std::size_t shard_count, std::size_t count,
               std::byte* to) {
  alignas(64) float sum[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t block = count - first < kBlock ? count - first : kBlock;
    WidenAll<Half>(reinterpret_cast<const std::uint16_t*>(shards[0]) + first, block, sum);
    for (std::size_t s = 1; s < shard_count; ++s) {
      AddWidened<Half>(reinterpret_cast<const std::uint16_t*>(shards[s]) + first, block, sum);
    }
    NarrowAll<Half>(sum, block, reinterpret_cast<std::uint16_t*>(to) + first);
  }
}

template <typename Float>
void SumFloats(const std::byte* const* shards, std::size_t shard_count, std::size_t count,
               std::byte* to) {
  alignas(64) Float sum[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t block = count - first < kBlock ? count - first : kBlock;
    std::memcpy(sum, shards[0] + first * sizeof(Float), block * sizeof(Float));
    for (std::size_t s = 1; s < shard_count; ++s) {
      AddAll(reinterpret_cast<const Float*>(shards[s]) + first, block, sum);
    }
    std::memcpy(to + first * sizeof(Float), sum, block * sizeof(Float));
  }
}

void SumOnTarget(DataType wire, const std::byte* const* shards, std::size_t shard_count,
                 std::size_t count, std::byte* to) {
  switch (wire) {
    case DataType::kFloat32:
      return SumFloats<float>(shards, shard_count, count, to);
    case DataType::kFloat64:
      return SumFloats<double>(shards, shard_count, count, to);
    case DataType::kFloat16:
      return SumHalves<Float16>(shards, shard_count, count, to);
    case DataType::kBfloat16:
      return SumHalves<Bfloat16>(shards, shard_count, count, to);
    case DataType::kUnspecified:
      return;
  }
}

void NarrowOnTarget(DataType wire, const float* from, std::size_t count, std::byte* to) {
  auto* const halves = reinterpret_cast<std::uint16_t*>(to);
  if (wire == DataType::kBfloat16) return NarrowAll<Bfloat16>(from, count, halves);
  NarrowAll<Float16>(from, count, halves);
}

void WidenOnTarget(DataType wire, const std::byte* from, std::size_t count, float* to) {
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
  if (wire == DataType::kBfloat16) return WidenAll<Bfloat16>(halves, count, to);
  WidenAll<Float16>(halves, count, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace gradsync
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync {

HWY_EXPORT(SumOnTarget);
HWY_EXPORT(NarrowOnTarget);
HWY_EXPORT(WidenOnTarget);

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
  HWY_DYNAMIC_DISPATCH(NarrowOnTarget)(wire, from, count, to);
}

void Widen(DataType wire, const std::byte* from, std::size_t count, float* to) {
  HWY_DYNAMIC_DISPATCH(WidenOnTarget)(wire, from, count, to);
}

void SumShards(DataType wire, absl::Span<const std::byte* const> shards, std::size_t count,
               std::byte* to) {
  HWY_DYNAMIC_DISPATCH(SumOnTarget)(wire, shards.data(), shards.size(), count, to);
}

}  // namespace gradsync
#endif  // HWY_ONCE
