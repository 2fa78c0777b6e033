#include "daemon/reduce/combine_order_free.h"

#include <cstdint>
#include <cstring>
#include <limits>

// Compiles this file once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "daemon/reduce/combine_order_free.cc"
#include "hwy/foreach_target.h"  // before highway.h
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gradsync::daemon {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- Lanes: the integers that stand for elements in the loop ------------------------------------

template <typename Int>
struct IntegerLanes {
  using Lane = Int;
  using Vector = hn::Vec<hn::ScalableTag<Lane>>;
  static constexpr Lane kLeast = std::numeric_limits<Lane>::min();
  static constexpr Lane kLargest = std::numeric_limits<Lane>::max();

  template <class Op>
  static HWY_INLINE Vector FromElements(Vector elements) {
    return elements;
  }
  static HWY_INLINE Vector ToElements(Vector lanes) { return lanes; }
};

// The bits of a floating-point number, as a signed integer, are in the order of the numbers once
// those of negative numbers are flipped below the sign. `kInfinity`: the bits of Inf.
template <typename Int, Int kInfinity>
struct FloatLanes {
  using Lane = Int;
  using Tag = hn::ScalableTag<Lane>;
  using Vector = hn::Vec<Tag>;
  static constexpr Lane kBelowSign = std::numeric_limits<Lane>::max();
  static constexpr Lane kLeast = static_cast<Lane>(~kInfinity);  // of -Inf, flipped
  static constexpr Lane kLargest = kInfinity;

  static HWY_INLINE Vector Flip(Vector bits) {
    return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), hn::Set(Tag(), kBelowSign)));
  }
  // A NaN becomes the integer that wins; back as an element, that is a NaN again.
  template <class Op>
  static HWY_INLINE Vector FromElements(Vector bits) {
    const auto magnitude = hn::And(bits, hn::Set(Tag(), kBelowSign));
    return hn::IfThenElse(hn::Gt(magnitude, hn::Set(Tag(), kInfinity)),
                          hn::Set(Tag(), Op::template Winner<Lane>()), Flip(bits));
  }
  static HWY_INLINE Vector ToElements(Vector lanes) { return Flip(lanes); }
};

using Float16Lanes = FloatLanes<std::int16_t, 0x7C00>;
using Bfloat16Lanes = FloatLanes<std::int16_t, 0x7F80>;
using Float32Lanes = FloatLanes<std::int32_t, 0x7F800000>;
using Float64Lanes = FloatLanes<std::int64_t, 0x7FF0000000000000>;

// ---- Operations: Combine, the lane that changes nothing, and the one that wins ------------------

struct SumOp {
  template <class Vector>
  static HWY_INLINE Vector Combine(Vector a, Vector b) {
    return hn::Add(a, b);
  }
  template <class Lanes>
  static constexpr typename Lanes::Lane Neutral() {
    return 0;
  }
};

struct MinOp {
  template <class Vector>
  static HWY_INLINE Vector Combine(Vector a, Vector b) {
    return hn::Min(a, b);
  }
  template <class Lanes>
  static constexpr typename Lanes::Lane Neutral() {
    return Lanes::kLargest;
  }
  template <typename Lane>
  static constexpr Lane Winner() {
    return std::numeric_limits<Lane>::min();
  }
};

struct MaxOp {
  template <class Vector>
  static HWY_INLINE Vector Combine(Vector a, Vector b) {
    return hn::Max(a, b);
  }
  template <class Lanes>
  static constexpr typename Lanes::Lane Neutral() {
    return Lanes::kLeast;
  }
  template <typename Lane>
  static constexpr Lane Winner() {
    return std::numeric_limits<Lane>::max();
  }
};

// ---- The loop -----------------------------------------------------------------------------------

struct Buffers {
  const std::byte* const* from;
  std::size_t from_count;
  std::byte* const* to;
  std::size_t to_count;
};

// One vector, at `offset` bytes. kFrom: how many buffers are read; 0: from_count, which is not 0.
template <class Lanes, class Op, std::size_t kFrom>
HWY_INLINE typename Lanes::Vector CombineVector(const Buffers& buffers, std::size_t offset) {
  using Lane = typename Lanes::Lane;
  const hn::ScalableTag<Lane> tag;
  const auto load = [&](std::size_t b) {
    return Lanes::template FromElements<Op>(
        hn::LoadU(tag, reinterpret_cast<const Lane*>(buffers.from[b] + offset)));
  };
  const std::size_t from_count = kFrom == 0 ? buffers.from_count : kFrom;
  auto total = load(0);
  for (std::size_t b = 1; b < from_count; ++b) total = Op::Combine(total, load(b));
  return Lanes::ToElements(total);
}

template <class Lanes, class Op, std::size_t kFrom>
void CombineVectors(const Buffers& buffers, std::size_t bytes) {
  using Lane = typename Lanes::Lane;
  const hn::ScalableTag<Lane> tag;
  const std::size_t vector = hn::Lanes(tag) * sizeof(Lane);
  std::size_t offset = 0;
  for (; offset + vector <= bytes; offset += vector) {
    const auto result = CombineVector<Lanes, Op, kFrom>(buffers, offset);
    for (std::size_t b = 0; b < buffers.to_count; ++b) {
      hn::StoreU(result, tag, reinterpret_cast<Lane*>(buffers.to[b] + offset));
    }
  }
  if (offset == bytes) return;
  // The last elements go through a padded copy.
  alignas(64) std::byte total[hn::MaxLanes(hn::ScalableTag<Lane>()) * sizeof(Lane)] = {};
  alignas(64) std::byte padded[sizeof(total)] = {};
  const std::byte* const pair[] = {total, padded};
  std::memcpy(total, buffers.from[0] + offset, bytes - offset);
  for (std::size_t b = 1; b < buffers.from_count; ++b) {
    std::memcpy(padded, buffers.from[b] + offset, bytes - offset);
    const auto result = CombineVector<Lanes, Op, 2>({pair, 2, nullptr, 0}, 0);
    hn::StoreU(result, tag, reinterpret_cast<Lane*>(total));
  }
  for (std::size_t b = 0; b < buffers.to_count; ++b) {
    std::memcpy(buffers.to[b] + offset, total, bytes - offset);
  }
}

template <class Lanes, class Op>
void FillNeutral(const Buffers& buffers, std::size_t count) {
  using Lane = typename Lanes::Lane;
  const hn::ScalableTag<Lane> tag;
  const Lane element = hn::GetLane(Lanes::ToElements(hn::Set(tag, Op::template Neutral<Lanes>())));
  for (std::size_t b = 0; b < buffers.to_count; ++b) {
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(buffers.to[b] + i * sizeof(Lane), &element, sizeof(Lane));
    }
  }
}

template <class Lanes, class Op>
void CombineElements(const Buffers& buffers, std::size_t count) {
  const std::size_t bytes = count * sizeof(typename Lanes::Lane);
  switch (buffers.from_count) {
    case 0:
      return FillNeutral<Lanes, Op>(buffers, count);
    case 2:
      return CombineVectors<Lanes, Op, 2>(buffers, bytes);
    default:
      return CombineVectors<Lanes, Op, 0>(buffers, bytes);
  }
}

template <class Op>
void SelectElements(DataType dtype, const Buffers& buffers, std::size_t count) {
  switch (dtype) {
    case DataType::kFloat32:
      return CombineElements<Float32Lanes, Op>(buffers, count);
    case DataType::kFloat64:
      return CombineElements<Float64Lanes, Op>(buffers, count);
    case DataType::kFloat16:
      return CombineElements<Float16Lanes, Op>(buffers, count);
    case DataType::kBfloat16:
      return CombineElements<Bfloat16Lanes, Op>(buffers, count);
    case DataType::kInt8:
      return CombineElements<IntegerLanes<std::int8_t>, Op>(buffers, count);
    case DataType::kUint8:
      return CombineElements<IntegerLanes<std::uint8_t>, Op>(buffers, count);
    case DataType::kInt16:
      return CombineElements<IntegerLanes<std::int16_t>, Op>(buffers, count);
    case DataType::kInt32:
      return CombineElements<IntegerLanes<std::int32_t>, Op>(buffers, count);
    case DataType::kInt64:
      return CombineElements<IntegerLanes<std::int64_t>, Op>(buffers, count);
    case DataType::kUnspecified:
      return;
  }
}

// The sum has the same bits whether integers have a sign or not.
void SumElements(DataType dtype, const Buffers& buffers, std::size_t count) {
  switch (ItemSize(dtype)) {
    case 1:
      return CombineElements<IntegerLanes<std::uint8_t>, SumOp>(buffers, count);
    case 2:
      return CombineElements<IntegerLanes<std::uint16_t>, SumOp>(buffers, count);
    case 4:
      return CombineElements<IntegerLanes<std::uint32_t>, SumOp>(buffers, count);
    case 8:
      return CombineElements<IntegerLanes<std::uint64_t>, SumOp>(buffers, count);
    default:
      return;
  }
}

void CombineOnTarget(ReduceOp op, DataType dtype, const std::byte* const* from,
                     std::size_t from_count, std::size_t count, std::byte* const* to,
                     std::size_t to_count) {
  const Buffers buffers{from, from_count, to, to_count};
  switch (op) {
    case ReduceOp::kSum:
      return SumElements(dtype, buffers, count);
    case ReduceOp::kMin:
      return SelectElements<MinOp>(dtype, buffers, count);
    case ReduceOp::kMax:
      return SelectElements<MaxOp>(dtype, buffers, count);
    case ReduceOp::kAverage:
      return;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gradsync::daemon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync::daemon {

HWY_EXPORT(CombineOnTarget);

void CombineOrderFree(ReduceOp op, DataType dtype, absl::Span<const std::byte* const> from,
                      std::size_t count, absl::Span<std::byte* const> to) {
  HWY_DYNAMIC_DISPATCH(CombineOnTarget)
  (op, dtype, from.data(), from.size(), count, to.data(), to.size());
}

void CombineOrderFree(ReduceOp op, DataType dtype, absl::Span<std::byte* const> buffers,
                      std::size_t count) {
  if (buffers.size() < 2) return;
  const absl::Span<const std::byte* const> from(buffers.data(), buffers.size());
  CombineOrderFree(op, dtype, from, count, buffers);
}

}  // namespace gradsync::daemon
#endif  // HWY_ONCE
