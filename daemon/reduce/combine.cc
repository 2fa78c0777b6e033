#include "daemon/reduce/combine.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// This file keeps vectors in classes, which have a fixed size. Scalable vectors have none.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Compiles this file once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "daemon/reduce/combine.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gradsync::daemon {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The loop for two ranks prefetches cache lines for writing this far ahead. Hardware prefetch loads
// lines as shared, and the store would wait again to own them. This distance was measured against 1
// to 16 KiB. Without the prefetch, buffers that fit the caches are faster. More than two ranks are
// faster without it, too, because a line one page ahead lies in the same set of the L1 cache.
constexpr std::size_t kPrefetchBytes = 4096;
constexpr std::size_t kPrefetchMinBufferBytes = 2 * 1024 * 1024;
constexpr std::size_t kPrefetchMaxBuffers = 2;
constexpr std::size_t kCacheLineBytes = 64;

// Bytes of one buffer over which squares are summed in float32 before the sum is widened. Few
// enough for the precision of float32, and to be still in the L1 cache if they must be read again;
// enough to hide the cost of widening.
constexpr std::size_t kBlockBytes = 16 * 1024;

HWY_INLINE void PrefetchForWrite(const std::byte* address) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  // __builtin_prefetch would prefetch for reading: the compiler does not know that every CPU with
  // SSSE3 has this instruction.
  asm volatile("prefetchw %0" : : "m"(*address));
#else
  __builtin_prefetch(address, /*rw=*/1);
#endif
}

// ---- Units: what one turn of the loop loads from a buffer, adds up, scales and stores -----------
// Written() is what Load() would read back after Store(), and Squares lanes of sums of its squares.

template <typename Float>
struct FloatUnit {
  using Tag = hn::ScalableTag<Float>;
  using Sum = hn::Vec<Tag>;
  using Factor = hn::Vec<Tag>;
  static constexpr std::size_t kBytes = hn::MaxLanes(Tag()) * sizeof(Float);
  // The type of an element's bits, the bits of its exponent, and the type of its values in the
  // loop.
  using Bits = std::conditional_t<sizeof(Float) == 8, std::uint64_t, std::uint32_t>;
  static constexpr Bits kExponent =
      static_cast<Bits>(sizeof(Float) == 8 ? 0x7FF0000000000000u : 0x7F800000u);
  using Wide = Float;

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

  using Squares = hn::Vec<Tag>;
  static HWY_INLINE Sum Written(Sum sum) { return sum; }
  static HWY_INLINE Squares AddSquares(Squares squares, Sum written) {
    return hn::MulAdd(written, written, squares);
  }
  static HWY_INLINE void StoreWide(Sum sum, Float* to) { hn::StoreU(sum, Tag(), to); }
  // As StoreWide, in the order of the elements, and its inverse.
  static HWY_INLINE void StoreOrdered(Sum sum, Float* to) { hn::StoreU(sum, Tag(), to); }
  static HWY_INLINE Sum LoadOrdered(const Float* from) { return hn::LoadU(Tag(), from); }
};

// 16-bit elements are taken in pairs out of 32-bit lanes: one float32 vector holds the even
// elements, another one the odd elements. So widening and narrowing need no shuffles. `Half`
// converts between 16 bits in a 32-bit lane and float32. Highway 1.0.3 has such conversions, but
// its bfloat16 truncates, and its float16 without F16C truncates and loses Inf and NaN.
template <class Half>
struct PairUnit {
  using TagF = hn::ScalableTag<float>;
  using TagU = hn::ScalableTag<std::uint32_t>;
  using Pairs = hn::Vec<TagU>;
  using Bits = std::uint16_t;
  static constexpr Bits kExponent = Half::kExponent;
  using Wide = float;
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
    const Pairs pairs = hn::LoadU(TagU(), reinterpret_cast<const std::uint32_t*>(from));
    return {Half::WidenLow(pairs), Half::WidenHigh(pairs)};
  }
  static HWY_INLINE Sum Add(Sum a, Sum b) {
    return {hn::Add(a.even, b.even), hn::Add(a.odd, b.odd)};
  }
  static HWY_INLINE Sum Scale(Sum sum, Factor factor) {
    return {hn::Mul(sum.even, factor), hn::Mul(sum.odd, factor)};
  }
  static HWY_INLINE void Store(Sum sum, std::byte* to) {
    const Pairs pairs = hn::Or(Half::Narrow(sum.even), hn::ShiftLeft<16>(Half::Narrow(sum.odd)));
    hn::StoreU(pairs, TagU(), reinterpret_cast<std::uint32_t*>(to));
  }

  using Squares = hn::Vec<TagF>;
  static HWY_INLINE Sum Written(Sum sum) {
    return {Half::WidenLow(Half::Narrow(sum.even)), Half::WidenLow(Half::Narrow(sum.odd))};
  }
  static HWY_INLINE Squares AddSquares(Squares squares, Sum written) {
    return hn::MulAdd(written.odd, written.odd, hn::MulAdd(written.even, written.even, squares));
  }
  static HWY_INLINE void StoreWide(Sum sum, float* to) {
    hn::StoreU(sum.even, TagF(), to);
    hn::StoreU(sum.odd, TagF(), to + hn::MaxLanes(TagF()));
  }
  static HWY_INLINE void StoreOrdered(Sum sum, float* to) {
    hn::StoreInterleaved2(sum.even, sum.odd, TagF(), to);
  }
  static HWY_INLINE Sum LoadOrdered(const float* from) {
    Sum sum;
    hn::LoadInterleaved2(TagF(), from, sum.even, sum.odd);
    return sum;
  }
};

// SSE has only signed comparison. Both sides are below 2^31.
template <class Bits>
HWY_INLINE Bits IfGreaterElse(Bits a, Bits b, Bits yes, Bits no) {
  const hn::ScalableTag<std::int32_t> tag_i;
  const hn::ScalableTag<std::uint32_t> tag_u;
  return hn::IfThenElse(hn::RebindMask(tag_u, hn::Gt(hn::BitCast(tag_i, a), hn::BitCast(tag_i, b))),
                        yes, no);
}

struct Bfloat16Bits {
  static constexpr std::uint16_t kExponent = 0x7F80;
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
    // Rounds to nearest even: adds half of the dropped range less one, plus one if the kept part is
    // odd. A carry out of the largest finite number makes Inf.
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
  static constexpr std::uint16_t kExponent = 0x7C00;
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
    // In the fields of float32 the exponent is too small by 112. Multiplying by 2^112 corrects it.
    // This is exact and also normalizes subnormals.
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
    // Below 2^-14 the result is subnormal. Adding 0.5 makes the float adder align and round it.
    const Bits half_one = hn::Set(tag, 126u << 23);
    const Bits subnormal = hn::Sub(
        hn::BitCast(tag, hn::Add(hn::BitCast(tag_f, magnitude), hn::BitCast(tag_f, half_one))),
        half_one);
    // Otherwise subtracts 112 from the exponent. To round to nearest even, adds half less one plus
    // the last kept bit. From 65520 on the carry makes Inf.
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
  using Bits = std::uint16_t;
  static constexpr Bits kExponent = 0x7C00;

  static HWY_INLINE Sum Load(const std::byte* from) {
    return hn::PromoteTo(Tag(), hn::LoadU(Tag16(), reinterpret_cast<const hwy::float16_t*>(from)));
  }
  static HWY_INLINE void Store(Sum sum, std::byte* to) {
    hn::StoreU(hn::DemoteTo(Tag16(), sum), Tag16(), reinterpret_cast<hwy::float16_t*>(to));
  }
  static HWY_INLINE Sum Written(Sum sum) {
    return hn::PromoteTo(Tag(), hn::DemoteTo(Tag16(), sum));
  }
};
#else
using Float16Unit = PairUnit<Float16Bits>;
#endif

// ---- Statistics ---------------------------------------------------------------------------------

HWY_INLINE hn::Vec<hn::ScalableTag<double>> LoadDouble(const double* from) {
  return hn::Load(hn::ScalableTag<double>(), from);
}
HWY_INLINE hn::Vec<hn::ScalableTag<double>> LoadDouble(const float* from) {
  const hn::ScalableTag<double> tag;
  return hn::PromoteTo(tag, hn::Load(hn::Rebind<float, hn::ScalableTag<double>>(), from));
}

// Counts the elements whose exponent is all ones.
template <typename Bits>
std::uint64_t CountNonFinite(const std::byte* from, std::size_t bytes, Bits exponent) {
  const hn::ScalableTag<Bits> tag;
  constexpr std::size_t kVector = hn::MaxLanes(hn::ScalableTag<Bits>()) * sizeof(Bits);
  const auto mask = hn::Set(tag, exponent);
  std::uint64_t count = 0;
  std::size_t i = 0;
  for (; i + kVector <= bytes; i += kVector) {
    const auto bits = hn::LoadU(tag, reinterpret_cast<const Bits*>(from + i));
    count += hn::CountTrue(tag, hn::Eq(hn::And(bits, mask), mask));
  }
  for (; i < bytes; i += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    count += (bits & exponent) == exponent ? 1 : 0;
  }
  return count;
}

// Adds the statistics of written elements to `stats`. Sums in double, which holds every square
// except those of large float64 elements.
template <class Unit>
HWY_NOINLINE void Measure(const std::byte* from, std::size_t bytes, GradientStats* stats) {
  using Wide = typename Unit::Wide;
  constexpr std::size_t kElements = Unit::kBytes / sizeof(typename Unit::Bits);
  constexpr std::size_t kDoubles = hn::MaxLanes(hn::ScalableTag<double>());
  const hn::ScalableTag<double> tag;
  alignas(64) std::byte padded[Unit::kBytes] = {};
  alignas(64) Wide wide[kElements];
  auto squares = hn::Zero(tag);
  for (std::size_t i = 0; i < bytes; i += Unit::kBytes) {
    const std::byte* unit = from + i;
    if (bytes - i < Unit::kBytes) {
      std::memcpy(padded, unit, bytes - i);
      unit = padded;
    }
    Unit::StoreWide(Unit::Load(unit), wide);
    for (std::size_t e = 0; e < kElements; e += kDoubles) {
      const auto value = LoadDouble(wide + e);
      squares = hn::MulAdd(value, value, squares);
    }
  }
  const double sum = hn::GetLane(hn::SumOfLanes(tag, squares));
  stats->sum_of_squares += sum;
  if (!std::isfinite(sum)) {
    stats->non_finite += CountNonFinite<typename Unit::Bits>(from, bytes, Unit::kExponent);
  }
}

// As Measure, block by block: only blocks with a non-finite element are read twice.
template <class Unit>
void MeasureBlocks(const std::byte* from, std::size_t bytes, GradientStats* stats) {
  for (std::size_t i = 0; i < bytes; i += kBlockBytes) {
    Measure<Unit>(from + i, bytes - i < kBlockBytes ? bytes - i : kBlockBytes, stats);
  }
}

// Adds a block's statistics to `stats`. Uses the loop's sums in `squares` if they are precise.
template <class Unit>
HWY_INLINE void AddBlock(typename Unit::Squares squares, const std::byte* from, std::size_t bytes,
                         GradientStats* stats) {
  using Wide = typename Unit::Wide;
  using TagW = hn::ScalableTag<Wide>;
  const hn::ScalableTag<double> tag;
  alignas(64) Wide lanes[hn::MaxLanes(TagW())];
  hn::Store(squares, TagW(), lanes);
  auto widened = hn::Zero(tag);
  for (std::size_t i = 0; i < hn::MaxLanes(TagW()); i += hn::MaxLanes(tag)) {
    widened = hn::Add(widened, LoadDouble(lanes + i));
  }
  const double sum = hn::GetLane(hn::SumOfLanes(tag, widened));
  // Below this, squares that float32 has rounded to 0 could matter (2^-149 each, thousands of
  // them).
  constexpr double kSmallest = sizeof(Wide) == 8 ? 0.0 : 0x1p-100;
  // False for a NaN.
  if (sum >= kSmallest && sum <= std::numeric_limits<double>::max()) {
    stats->sum_of_squares += sum;
  } else {
    Measure<Unit>(from, bytes, stats);
  }
}

// ---- The loop -----------------------------------------------------------------------------------

// The last elements are fewer than a unit. They go through the same unit in a padded copy, so their
// bits equal those of the loop.
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
// unrolled, else 0. `stats` is null unless kStats.
template <class Unit, std::size_t kBuffers, bool kStats>
HWY_NOINLINE void CombineUnits(std::byte* const* buffers, std::size_t buffer_count,
                               std::size_t bytes, double scale, GradientStats* stats) {
  constexpr std::size_t kUnit = Unit::kBytes;
  constexpr std::size_t kTurn = 4 * kUnit;
  static_assert(kBlockBytes % kTurn == 0);
  const std::size_t k = kBuffers == 0 ? buffer_count : kBuffers;
  // No store through a buffer can alias this copy, so the compiler keeps it in registers.
  std::byte* local[kBuffers == 0 ? 1 : kBuffers];
  if (kBuffers != 0) {
    for (std::size_t b = 0; b < kBuffers; ++b) local[b] = buffers[b];
  }
  std::byte* const* const at = kBuffers == 0 ? buffers : local;
  const typename Unit::Factor factor = Unit::MakeFactor(scale);

  // Never past this slice's end, because another thread writes those lines.
  const std::size_t prefetch_end =
      bytes < kPrefetchMinBufferBytes ? 0 : bytes - kPrefetchBytes - kTurn;
  const std::size_t turns_end = bytes - bytes % kTurn;
  std::size_t i = 0;
  while (i < turns_end) {
    const std::size_t block = i;
    const std::size_t block_end =
        kStats && turns_end - i > kBlockBytes ? i + kBlockBytes : turns_end;
    typename Unit::Squares q0 = hn::Zero(hn::ScalableTag<typename Unit::Wide>());
    typename Unit::Squares q1 = q0;
    typename Unit::Squares q2 = q0;
    typename Unit::Squares q3 = q0;
    for (; i < block_end; i += kTurn) {
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
      if constexpr (kStats) {
        q0 = Unit::AddSquares(q0, Unit::Written(s0));
        q1 = Unit::AddSquares(q1, Unit::Written(s1));
        q2 = Unit::AddSquares(q2, Unit::Written(s2));
        q3 = Unit::AddSquares(q3, Unit::Written(s3));
      }
    }
    if constexpr (kStats) {
      const typename Unit::Squares squares = hn::Add(hn::Add(q0, q1), hn::Add(q2, q3));
      AddBlock<Unit>(squares, at[0] + block, i - block, stats);
    }
  }
  for (; i < bytes; i += kUnit) {
    const std::size_t left = bytes - i;
    CombineTail<Unit>(buffers, buffer_count, i, left < kUnit ? left : kUnit, scale);
  }
  if constexpr (kStats) Measure<Unit>(buffers[0] + turns_end, bytes - turns_end, stats);
}

// Nodes with up to four ranks are common: each of these numbers has its own loop.
template <class Unit, bool kStats>
void CombineBuffers(std::byte* const* buffers, std::size_t buffer_count, std::size_t bytes,
                    double scale, GradientStats* stats) {
  switch (buffer_count) {
    case 1:
      return CombineUnits<Unit, 1, kStats>(buffers, buffer_count, bytes, scale, stats);
    case 2:
      return CombineUnits<Unit, 2, kStats>(buffers, buffer_count, bytes, scale, stats);
    case 3:
      return CombineUnits<Unit, 3, kStats>(buffers, buffer_count, bytes, scale, stats);
    case 4:
      return CombineUnits<Unit, 4, kStats>(buffers, buffer_count, bytes, scale, stats);
    default:
      return CombineUnits<Unit, 0, kStats>(buffers, buffer_count, bytes, scale, stats);
  }
}

template <class Unit>
void CombineType(std::byte* const* buffers, std::size_t buffer_count, std::size_t count,
                 double scale, GradientStats* stats) {
  const std::size_t bytes = count * sizeof(typename Unit::Bits);
  const bool untouched = buffer_count == 1 && scale == 1.0;
  if (stats == nullptr) {
    if (!untouched) CombineBuffers<Unit, false>(buffers, buffer_count, bytes, scale, nullptr);
  } else if (untouched) {
    MeasureBlocks<Unit>(buffers[0], bytes, stats);
  } else {
    CombineBuffers<Unit, true>(buffers, buffer_count, bytes, scale, stats);
  }
}

void CombineOnTarget(DataType dtype, std::byte* const* buffers, std::size_t buffer_count,
                     std::size_t count, double scale, GradientStats* stats) {
  switch (dtype) {
    case DataType::kFloat32:
      return CombineType<FloatUnit<float>>(buffers, buffer_count, count, scale, stats);
    case DataType::kFloat64:
      return CombineType<FloatUnit<double>>(buffers, buffer_count, count, scale, stats);
    case DataType::kFloat16:
      return CombineType<Float16Unit>(buffers, buffer_count, count, scale, stats);
    case DataType::kBfloat16:
      return CombineType<Bfloat16Unit>(buffers, buffer_count, count, scale, stats);
    default:
      return;
  }
}

void MeasureAgainOnTarget(DataType dtype, std::byte* buffer, std::size_t count,
                          GradientStats* stats) {
  const std::size_t bytes = count * ItemSize(dtype);
  switch (dtype) {
    case DataType::kFloat32:
      return CombineBuffers<FloatUnit<float>, true>(&buffer, 1, bytes, 1.0, stats);
    case DataType::kFloat64:
      return CombineBuffers<FloatUnit<double>, true>(&buffer, 1, bytes, 1.0, stats);
    case DataType::kFloat16:
      return CombineBuffers<Float16Unit, true>(&buffer, 1, bytes, 1.0, stats);
    case DataType::kBfloat16:
      return CombineBuffers<Bfloat16Unit, true>(&buffer, 1, bytes, 1.0, stats);
    default:
      return;
  }
}

// ---- The loop in two halves ---------------------------------------------------------------------

template <class Unit>
void SumType(const std::byte* const* buffers, std::size_t buffer_count, std::size_t count,
             std::byte* sum) {
  using Wide = typename Unit::Wide;
  constexpr std::size_t kElements = Unit::kBytes / sizeof(typename Unit::Bits);
  Wide* const out = reinterpret_cast<Wide*>(sum);
  std::size_t i = 0;
  for (; i + kElements <= count; i += kElements) {
    const std::size_t offset = i * sizeof(typename Unit::Bits);
    typename Unit::Sum total = Unit::Load(buffers[0] + offset);
    for (std::size_t b = 1; b < buffer_count; ++b) {
      total = Unit::Add(total, Unit::Load(buffers[b] + offset));
    }
    Unit::StoreOrdered(total, out + i);
  }
  if (i == count) return;
  // The last elements go through a padded copy.
  const std::size_t offset = i * sizeof(typename Unit::Bits);
  const std::size_t bytes = (count - i) * sizeof(typename Unit::Bits);
  alignas(64) std::byte padded[Unit::kBytes] = {};
  alignas(64) Wide wide[kElements];
  std::memcpy(padded, buffers[0] + offset, bytes);
  typename Unit::Sum total = Unit::Load(padded);
  for (std::size_t b = 1; b < buffer_count; ++b) {
    std::memcpy(padded, buffers[b] + offset, bytes);
    total = Unit::Add(total, Unit::Load(padded));
  }
  Unit::StoreOrdered(total, wide);
  std::memcpy(out + i, wide, (count - i) * sizeof(Wide));
}

template <class Unit>
void ScaleType(const std::byte* sum, std::size_t count, double scale, std::byte* const* buffers,
               std::size_t buffer_count, GradientStats* stats) {
  using Wide = typename Unit::Wide;
  constexpr std::size_t kItem = sizeof(typename Unit::Bits);
  constexpr std::size_t kElements = Unit::kBytes / kItem;
  constexpr std::size_t kBlock = kBlockBytes / kItem;
  const typename Unit::Factor factor = Unit::MakeFactor(scale);
  const Wide* const in = reinterpret_cast<const Wide*>(sum);
  for (std::size_t block = 0; block < count; block += kBlock) {
    const std::size_t end = count - block < kBlock ? count : block + kBlock;
    std::size_t i = block;
    for (; i + kElements <= end; i += kElements) {
      const typename Unit::Sum scaled = Unit::Scale(Unit::LoadOrdered(in + i), factor);
      for (std::size_t b = 0; b < buffer_count; ++b) Unit::Store(scaled, buffers[b] + i * kItem);
    }
    if (i < end) {
      alignas(64) std::byte padded[Unit::kBytes];
      alignas(64) Wide wide[kElements] = {};
      std::memcpy(wide, in + i, (end - i) * sizeof(Wide));
      Unit::Store(Unit::Scale(Unit::LoadOrdered(wide), factor), padded);
      for (std::size_t b = 0; b < buffer_count; ++b) {
        std::memcpy(buffers[b] + i * kItem, padded, (end - i) * kItem);
      }
    }
    // The block is still in the L1 cache.
    if (stats != nullptr) {
      Measure<Unit>(buffers[0] + block * kItem, (end - block) * kItem, stats);
    }
  }
}

void SumIntoOnTarget(DataType dtype, const std::byte* const* buffers, std::size_t buffer_count,
                     std::size_t count, std::byte* sum) {
  switch (dtype) {
    case DataType::kFloat32:
      return SumType<FloatUnit<float>>(buffers, buffer_count, count, sum);
    case DataType::kFloat64:
      return SumType<FloatUnit<double>>(buffers, buffer_count, count, sum);
    case DataType::kFloat16:
      return SumType<Float16Unit>(buffers, buffer_count, count, sum);
    case DataType::kBfloat16:
      return SumType<Bfloat16Unit>(buffers, buffer_count, count, sum);
    default:
      return;
  }
}

void ScaleIntoOnTarget(DataType dtype, const std::byte* sum, std::size_t count, double scale,
                       std::byte* const* buffers, std::size_t buffer_count, GradientStats* stats) {
  switch (dtype) {
    case DataType::kFloat32:
      return ScaleType<FloatUnit<float>>(sum, count, scale, buffers, buffer_count, stats);
    case DataType::kFloat64:
      return ScaleType<FloatUnit<double>>(sum, count, scale, buffers, buffer_count, stats);
    case DataType::kFloat16:
      return ScaleType<Float16Unit>(sum, count, scale, buffers, buffer_count, stats);
    case DataType::kBfloat16:
      return ScaleType<Bfloat16Unit>(sum, count, scale, buffers, buffer_count, stats);
    default:
      return;
  }
}

const char* NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace gradsync::daemon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync::daemon {

HWY_EXPORT(CombineOnTarget);
HWY_EXPORT(MeasureAgainOnTarget);
HWY_EXPORT(SumIntoOnTarget);
HWY_EXPORT(ScaleIntoOnTarget);
HWY_EXPORT(NameOfTarget);

void Combine(DataType dtype, absl::Span<std::byte* const> buffers, std::size_t count, double scale,
             GradientStats* stats) {
  if (stats != nullptr) *stats = GradientStats{};
  if (count == 0 || buffers.empty()) return;
  HWY_DYNAMIC_DISPATCH(CombineOnTarget)
  (dtype, buffers.data(), buffers.size(), count, scale, stats);
}

void MeasureAgain(DataType dtype, std::byte* buffer, std::size_t count, GradientStats* stats) {
  *stats = GradientStats{};
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(MeasureAgainOnTarget)(dtype, buffer, count, stats);
}

void SumInto(DataType dtype, absl::Span<const std::byte* const> buffers, std::size_t count,
             std::byte* sum) {
  if (count == 0) return;
  if (buffers.empty()) {
    std::memset(sum, 0, count * (ItemSize(dtype) == 2 ? sizeof(float) : ItemSize(dtype)));
    return;
  }
  HWY_DYNAMIC_DISPATCH(SumIntoOnTarget)(dtype, buffers.data(), buffers.size(), count, sum);
}

void ScaleInto(DataType dtype, const std::byte* sum, std::size_t count, double scale,
               absl::Span<std::byte* const> buffers, GradientStats* stats) {
  if (stats != nullptr) *stats = GradientStats{};
  if (count == 0 || buffers.empty()) return;
  HWY_DYNAMIC_DISPATCH(ScaleIntoOnTarget)
  (dtype, sum, count, scale, buffers.data(), buffers.size(), stats);
}

const char* CombineTarget() { return HWY_DYNAMIC_DISPATCH(NameOfTarget)(); }

}  // namespace gradsync::daemon
#endif  // HWY_ONCE
