#include "daemon/reduce/combine.h"

#include <cstdint>
#include <cstring>

// Vectors are members and locals of fixed size here, which scalable ones cannot be.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Compiles this file once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "daemon/reduce/combine.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gradsync {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Two ranks' loop claims lines for writing this far ahead: hardware prefetch brings them as shared,
// and the store would wait once more to own them. Measured against 1 to 16 KiB; a buffer that fits
// the caches anyway is faster without. So are more ranks: a page ahead is the same set of the L1
// cache.
constexpr std::size_t kPrefetchBytes = 4096;
constexpr std::size_t kPrefetchMinBufferBytes = 2 * 1024 * 1024;
constexpr std::size_t kPrefetchMaxBuffers = 2;
constexpr std::size_t kCacheLineBytes = 64;

HWY_INLINE void PrefetchForWrite(const std::byte* address) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  // __builtin_prefetch would read: the compiler is not told that every CPU with SSSE3 knows this
  // one.
  asm volatile("prefetchw %0" : : "m"(*address));
#else
  __builtin_prefetch(address, /*rw=*/1);
#endif
}

// ---- Units: what one turn of the loop loads from a buffer, adds up, scales and stores -----------

template <typename Float>
struct FloatUnit {
  using Tag = hn::ScalableTag<Float>;
  using Sum = hn::Vec<Tag>;
  using Factor = hn::Vec<Tag>;
  static constexpr std::size_t kBytes = hn::MaxLanes(Tag()) * sizeof(Float);

  static HWY_INLINE Factor MakeFactor(double scale) {
    return hn::Set(Tag(), static_cast<Float>(scale));
  }
  static HWY_INLINE Sum Load(const std::byte* from) {
    return hn::LoadU(Tag(), reinterpret_cast<const Float*>(from));
  }
  static HWY_INLINE Sum Add(Sum a, Sum b) { return hn::Add(a, b); }
  static HWY_INLINE Sum Scale(Sum sum, Factor factor) { return hn::Mul(sum, factor); }
  static HWY_INLINE void Store(Sum sum, std::byte* to) {
    hn::StoreU(sum, Tag(), reinterpret_cast<Float*>(to));
  }
};

// 16-bit elements are taken in pairs out of 32-bit lanes, one vector of float32 for the even and
// one for the odd elements: widening and narrowing then need no shuffles. `Half` converts between
// 16 bits in a 32-bit lane and float32. Highway 1.0.3 has such conversions, but its bfloat16
// truncates, and its float16 without F16C truncates and loses Inf and NaN.
template <class Half>
struct PairUnit {
  using TagF = hn::ScalableTag<float>;
  using TagU = hn::ScalableTag<std::uint32_t>;
  using Bits = hn::Vec<TagU>;
  struct Sum {
    hn::Vec<TagF> even;
    hn::Vec<TagF> odd;
  };
  using Factor = hn::Vec<TagF>;
  static constexpr std::size_t kBytes = hn::MaxLanes(TagU()) * sizeof(std::uint32_t);

  static HWY_INLINE Factor MakeFactor(double scale) {
    return hn::Set(TagF(), static_cast<float>(scale));
  }
  static HWY_INLINE Sum Load(const std::byte* from) {
    const Bits pairs = hn::LoadU(TagU(), reinterpret_cast<const std::uint32_t*>(from));
    return {Half::WidenLow(pairs), Half::WidenHigh(pairs)};
  }
  static HWY_INLINE Sum Add(Sum a, Sum b) {
    return {hn::Add(a.even, b.even), hn::Add(a.odd, b.odd)};
  }
  static HWY_INLINE Sum Scale(Sum sum, Factor factor) {
    return {hn::Mul(sum.even, factor), hn::Mul(sum.odd, factor)};
  }
  static HWY_INLINE void Store(Sum sum, std::byte* to) {
    const Bits pairs = hn::Or(Half::Narrow(sum.even), hn::ShiftLeft<16>(Half::Narrow(sum.odd)));
    hn::StoreU(pairs, TagU(), reinterpret_cast<std::uint32_t*>(to));
  }
};

// Signed comparison is what SSE has; both sides are below 2^31.
template <class Bits>
HWY_INLINE Bits IfGreaterElse(Bits a, Bits b, Bits yes, Bits no) {
  const hn::ScalableTag<std::int32_t> tag_i;
  const hn::ScalableTag<std::uint32_t> tag_u;
  return hn::IfThenElse(hn::RebindMask(tag_u, hn::Gt(hn::BitCast(tag_i, a), hn::BitCast(tag_i, b))),
                        yes, no);
}

struct Bfloat16Bits {
  using TagF = hn::ScalableTag<float>;
  using TagU = hn::ScalableTag<std::uint32_t>;
  using Bits = hn::Vec<TagU>;

  static HWY_INLINE hn::Vec<TagF> WidenLow(Bits pairs) {
    return hn::BitCast(TagF(), hn::ShiftLeft<16>(pairs));
  }
  static HWY_INLINE hn::Vec<TagF> WidenHigh(Bits pairs) {
    return hn::BitCast(TagF(), hn::And(pairs, hn::Set(TagU(), 0xFFFF0000u)));
  }
  static HWY_INLINE Bits Narrow(hn::Vec<TagF> value) {
    const TagU tag;
    const Bits bits = hn::BitCast(tag, value);
    const Bits truncated = hn::ShiftRight<16>(bits);
    // Half of the dropped range less one, plus one if the kept part is odd: nearest even. A carry
    // out of the largest finite number makes Inf.
    const Bits last_bit = hn::And(truncated, hn::Set(tag, 1u));
    const Bits rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(last_bit, hn::Set(tag, 0x7FFFu))));
    // Rounding would turn some NaNs into Inf or 0. Truncation keeps a NaN that comes out of a
    // multiplication: it is quiet, and the quiet bit is in the upper half.
    return IfGreaterElse(hn::And(bits, hn::Set(tag, 0x7FFFFFFFu)), hn::Set(tag, 0x7F800000u),
                         truncated, rounded);
  }
};

// binary16 for CPUs without F16C (F. Giesen's float_to_half_fast3_rtne and its inverse).
struct Float16Bits {
  using TagF = hn::ScalableTag<float>;
  using TagU = hn::ScalableTag<std::uint32_t>;
  using Bits = hn::Vec<TagU>;

  static HWY_INLINE hn::Vec<TagF> WidenLow(Bits pairs) {
    return Widen(hn::And(pairs, hn::Set(TagU(), 0xFFFFu)));
  }
  static HWY_INLINE hn::Vec<TagF> WidenHigh(Bits pairs) { return Widen(hn::ShiftRight<16>(pairs)); }

  static HWY_INLINE hn::Vec<TagF> Widen(Bits half) {
    const TagF tag_f;
    const TagU tag;
    // Moved to float32's fields, the exponent is too small by 112; multiplying by 2^112 also
    // normalizes subnormals and is exact.
    const Bits magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(tag, 0x7FFFu)));
    const Bits finite =
        hn::BitCast(tag, hn::Mul(hn::BitCast(tag_f, magnitude),
                                 hn::BitCast(tag_f, hn::Set(tag, (127u + 112u) << 23))));
    const Bits special = hn::Or(magnitude, hn::Set(tag, 0x7F800000u));
    const Bits wide = IfGreaterElse(magnitude, hn::Set(tag, (31u << 23) - 1u), special, finite);
    const Bits sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(tag, 0x8000u)));
    return hn::BitCast(tag_f, hn::Or(wide, sign));
  }

  static HWY_INLINE Bits Narrow(hn::Vec<TagF> value) {
    const TagF tag_f;
    const TagU tag;
    const Bits bits = hn::BitCast(tag, value);
    const Bits magnitude = hn::And(bits, hn::Set(tag, 0x7FFFFFFFu));
    // Below 2^-14 the result is subnormal: adding 0.5 lets the float adder align and round it.
    const Bits half_one = hn::Set(tag, 126u << 23);
    const Bits subnormal = hn::Sub(
        hn::BitCast(tag, hn::Add(hn::BitCast(tag_f, magnitude), hn::BitCast(tag_f, half_one))),
        half_one);
    // Otherwise the exponent is moved down by 112, and nearest even is half less one plus the last
    // kept bit. From 65520 on the carry makes Inf.
    const Bits last_bit = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(tag, 1u));
    const Bits normal = hn::ShiftRight<13>(
        hn::Add(magnitude, hn::Sub(last_bit, hn::Set(tag, (112u << 23) - 0xFFFu))));
    const Bits nan =
        hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(tag, 0x3FFu)), hn::Set(tag, 0x7E00u));
    Bits narrow = IfGreaterElse(hn::Set(tag, 113u << 23), magnitude, subnormal, normal);
    narrow = IfGreaterElse(magnitude, hn::Set(tag, 143u << 23), hn::Set(tag, 0x7C00u), narrow);
    narrow = IfGreaterElse(magnitude, hn::Set(tag, 0x7F800000u), nan, narrow);
    return hn::Or(narrow, hn::ShiftRight<16>(hn::And(bits, hn::Set(tag, 0x80000000u))));
  }
};

using Bfloat16Unit = PairUnit<Bfloat16Bits>;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
// F16C is part of these targets. It rounds to nearest even and keeps Inf, NaN and subnormals.
struct Float16Unit : FloatUnit<float> {
  using Tag16 = hn::Rebind<hwy::float16_t, Tag>;
  static constexpr std::size_t kBytes = hn::MaxLanes(Tag()) * sizeof(hwy::float16_t);

  static HWY_INLINE Sum Load(const std::byte* from) {
    return hn::PromoteTo(Tag(), hn::LoadU(Tag16(), reinterpret_cast<const hwy::float16_t*>(from)));
  }
  static HWY_INLINE void Store(Sum sum, std::byte* to) {
    hn::StoreU(hn::DemoteTo(Tag16(), sum), Tag16(), reinterpret_cast<hwy::float16_t*>(to));
  }
};
#else
using Float16Unit = PairUnit<Float16Bits>;
#endif

// ---- The loop -----------------------------------------------------------------------------------

// The last elements, fewer than a unit: the same unit, through a padded copy, so their bits are
// those of the loop.
template <class Unit>
HWY_NOINLINE void CombineTail(std::byte* const* buffers, std::size_t buffer_count,
                              std::size_t offset, std::size_t bytes, double scale) {
  alignas(64) std::byte padded[Unit::kBytes] = {};
  std::memcpy(padded, buffers[0] + offset, bytes);
  typename Unit::Sum sum = Unit::Load(padded);
  for (std::size_t b = 1; b < buffer_count; ++b) {
    std::memcpy(padded, buffers[b] + offset, bytes);
    sum = Unit::Add(sum, Unit::Load(padded));
  }
  Unit::Store(Unit::Scale(sum, Unit::MakeFactor(scale)), padded);
  for (std::size_t b = 0; b < buffer_count; ++b) std::memcpy(buffers[b] + offset, padded, bytes);
}

// One turn takes four units from every buffer: enough independent sums to hide the adder's latency,
// and few enough to stay in registers. kBuffers is the number of buffers if the loops over them are
// to be unrolled, else 0.
template <class Unit, std::size_t kBuffers>
HWY_NOINLINE void CombineUnits(std::byte* const* buffers, std::size_t buffer_count,
                               std::size_t bytes, double scale) {
  constexpr std::size_t kUnit = Unit::kBytes;
  constexpr std::size_t kTurn = 4 * kUnit;
  const std::size_t k = kBuffers == 0 ? buffer_count : kBuffers;
  // A copy that no store through a buffer can alias: the compiler keeps it in registers.
  std::byte* local[kBuffers == 0 ? 1 : kBuffers];
  if (kBuffers != 0) {
    for (std::size_t b = 0; b < kBuffers; ++b) local[b] = buffers[b];
  }
  std::byte* const* const at = kBuffers == 0 ? buffers : local;
  const typename Unit::Factor factor = Unit::MakeFactor(scale);

  // Not past this slice's end: the lines there are another thread's.
  const std::size_t prefetch_end =
      bytes < kPrefetchMinBufferBytes ? 0 : bytes - kPrefetchBytes - kTurn;
  std::size_t i = 0;
  for (; i + kTurn <= bytes; i += kTurn) {
    if (kBuffers != 0 && kBuffers <= kPrefetchMaxBuffers && i < prefetch_end &&
        i % kCacheLineBytes == 0) {
      for (std::size_t b = 0; b < k; ++b) {
        for (std::size_t line = 0; line < kTurn; line += kCacheLineBytes) {
          PrefetchForWrite(at[b] + i + kPrefetchBytes + line);
        }
      }
    }
    typename Unit::Sum s0 = Unit::Load(at[0] + i);
    typename Unit::Sum s1 = Unit::Load(at[0] + i + kUnit);
    typename Unit::Sum s2 = Unit::Load(at[0] + i + 2 * kUnit);
    typename Unit::Sum s3 = Unit::Load(at[0] + i + 3 * kUnit);
    for (std::size_t b = 1; b < k; ++b) {
      s0 = Unit::Add(s0, Unit::Load(at[b] + i));
      s1 = Unit::Add(s1, Unit::Load(at[b] + i + kUnit));
      s2 = Unit::Add(s2, Unit::Load(at[b] + i + 2 * kUnit));
      s3 = Unit::Add(s3, Unit::Load(at[b] + i + 3 * kUnit));
    }
    s0 = Unit::Scale(s0, factor);
    s1 = Unit::Scale(s1, factor);
    s2 = Unit::Scale(s2, factor);
    s3 = Unit::Scale(s3, factor);
    for (std::size_t b = 0; b < k; ++b) {
      Unit::Store(s0, at[b] + i);
      Unit::Store(s1, at[b] + i + kUnit);
      Unit::Store(s2, at[b] + i + 2 * kUnit);
      Unit::Store(s3, at[b] + i + 3 * kUnit);
    }
  }
  for (; i < bytes; i += kUnit) {
    const std::size_t left = bytes - i;
    CombineTail<Unit>(buffers, buffer_count, i, left < kUnit ? left : kUnit, scale);
  }
}

// Up to four ranks, the common node, get a loop of their own.
template <class Unit>
void CombineBuffers(std::byte* const* buffers, std::size_t buffer_count, std::size_t bytes,
                    double scale) {
  switch (buffer_count) {
    case 1:
      return CombineUnits<Unit, 1>(buffers, buffer_count, bytes, scale);
    case 2:
      return CombineUnits<Unit, 2>(buffers, buffer_count, bytes, scale);
    case 3:
      return CombineUnits<Unit, 3>(buffers, buffer_count, bytes, scale);
    case 4:
      return CombineUnits<Unit, 4>(buffers, buffer_count, bytes, scale);
    default:
      return CombineUnits<Unit, 0>(buffers, buffer_count, bytes, scale);
  }
}

void CombineOnTarget(DataType dtype, std::byte* const* buffers, std::size_t buffer_count,
                     std::size_t count, double scale) {
  const std::size_t bytes = count * ItemSize(dtype);
  switch (dtype) {
    case DataType::kFloat32:
      return CombineBuffers<FloatUnit<float>>(buffers, buffer_count, bytes, scale);
    case DataType::kFloat64:
      return CombineBuffers<FloatUnit<double>>(buffers, buffer_count, bytes, scale);
    case DataType::kFloat16:
      return CombineBuffers<Float16Unit>(buffers, buffer_count, bytes, scale);
    case DataType::kBfloat16:
      return CombineBuffers<Bfloat16Unit>(buffers, buffer_count, bytes, scale);
    case DataType::kUnspecified:
      return;
  }
}

const char* NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace gradsync
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync {

HWY_EXPORT(CombineOnTarget);
HWY_EXPORT(NameOfTarget);

void Combine(DataType dtype, absl::Span<std::byte* const> buffers, std::size_t count,
             double scale) {
  if (count == 0 || buffers.empty()) return;
  if (buffers.size() == 1 && scale == 1.0) return;
  HWY_DYNAMIC_DISPATCH(CombineOnTarget)(dtype, buffers.data(), buffers.size(), count, scale);
}

const char* CombineTarget() { return HWY_DYNAMIC_DISPATCH(NameOfTarget)(); }

}  // namespace gradsync
#endif  // HWY_ONCE
