#include "tools/bench/vector_loops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/bench/vector_loops.cc"
#include "hwy/foreach_target.h"  // compiles this file once per instruction set
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gradsync::bench::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// How far ahead of the loop a line is asked for, in bytes of each buffer.
constexpr std::size_t kAhead = 4096;

// For writing: the line comes in exclusively at once, not first for reading.
HWY_INLINE void PrefetchForWrite(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

// How elements are loaded into and stored from the vectors that are calculated with.
template <typename T>
struct Wide {
  using Element = T;
  static constexpr hn::ScalableTag<T> kTag{};
  static HWY_INLINE auto Load(const T* from) { return hn::LoadU(kTag, from); }
  template <typename V>
  static HWY_INLINE void Store(V value, T* to) {
    hn::StoreU(value, kTag, to);
  }
};

template <typename Narrow>
struct Wide16 {
  using Element = Narrow;
  static constexpr hn::ScalableTag<float> kTag{};
  static constexpr hn::Rebind<Narrow, hn::ScalableTag<float>> kNarrow{};
  static HWY_INLINE auto Load(const Narrow* from) {
    return hn::PromoteTo(kTag, hn::LoadU(kNarrow, from));
  }
  template <typename V>
  static HWY_INLINE void Store(V value, Narrow* to) {
    hn::StoreU(hn::DemoteTo(kNarrow, value), kNarrow, to);
  }
};

template <>
struct Wide<hwy::float16_t> : Wide16<hwy::float16_t> {};
template <>
struct Wide<hwy::bfloat16_t> : Wide16<hwy::bfloat16_t> {};

template <typename T, int kRanks, Prefetch kPrefetch>
HWY_INLINE void AverageLoop(std::byte* const* buffers, std::size_t begin, std::size_t end) {
  using W = Wide<T>;
  constexpr std::size_t kLine = 64 / sizeof(T);
  constexpr std::size_t kLinesAhead = kAhead / 64;
  const std::size_t lanes = hn::Lanes(W::kTag);
  const auto factor = hn::Set(W::kTag, static_cast<hn::TFromD<decltype(W::kTag)>>(1) / kRanks);
  T* data[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) data[rank] = reinterpret_cast<T*>(buffers[rank]);
  // A line of each buffer at a time, or a vector if that is more.
  const std::size_t stride = lanes > kLine ? lanes : kLine;
  for (std::size_t i = begin; i < end; i += stride) {
    if constexpr (kPrefetch == Prefetch::kAhead) {
      for (int rank = 0; rank < kRanks; ++rank) {
        PrefetchForWrite(data[rank] + i + kLinesAhead * kLine);
      }
    }
    for (std::size_t j = i; j < i + stride; j += lanes) {
      auto sum = W::Load(data[0] + j);
      for (int rank = 1; rank < kRanks; ++rank) sum = hn::Add(sum, W::Load(data[rank] + j));
      sum = hn::Mul(sum, factor);
      for (int rank = 0; rank < kRanks; ++rank) W::Store(sum, data[rank] + j);
    }
  }
}

template <typename T, Prefetch kPrefetch>
void AverageRanks(std::byte* const* buffers, std::uint32_t ranks, std::size_t begin,
                  std::size_t end) {
  switch (ranks) {
    case 2:
      return AverageLoop<T, 2, kPrefetch>(buffers, begin, end);
    case 3:
      return AverageLoop<T, 3, kPrefetch>(buffers, begin, end);
    case 4:
      return AverageLoop<T, 4, kPrefetch>(buffers, begin, end);
    case 5:
      return AverageLoop<T, 5, kPrefetch>(buffers, begin, end);
    case 6:
      return AverageLoop<T, 6, kPrefetch>(buffers, begin, end);
    case 7:
      return AverageLoop<T, 7, kPrefetch>(buffers, begin, end);
    case 8:
      return AverageLoop<T, 8, kPrefetch>(buffers, begin, end);
    default:
      return;
  }
}

template <typename T>
void AverageType(Prefetch prefetch, std::byte* const* buffers, std::uint32_t ranks,
                 std::size_t begin, std::size_t end) {
  if (prefetch == Prefetch::kAhead) {
    AverageRanks<T, Prefetch::kAhead>(buffers, ranks, begin, end);
  } else {
    AverageRanks<T, Prefetch::kHardware>(buffers, ranks, begin, end);
  }
}

void AverageInPlaceTarget(DataType dtype, Prefetch prefetch, std::byte* const* buffers,
                          std::uint32_t ranks, std::size_t begin, std::size_t end) {
  switch (dtype) {
    case DataType::kFloat32:
      return AverageType<float>(prefetch, buffers, ranks, begin, end);
    case DataType::kFloat64:
      return AverageType<double>(prefetch, buffers, ranks, begin, end);
    case DataType::kFloat16:
      return AverageType<hwy::float16_t>(prefetch, buffers, ranks, begin, end);
    case DataType::kBfloat16:
      return AverageType<hwy::bfloat16_t>(prefetch, buffers, ranks, begin, end);
    default:
      return;
  }
}

// Calls loop(T* sum, const T* a, const T* b, vectors) on whole vectors, and for the rest on copies.
template <typename T, typename Loop>
HWY_INLINE void WholeVectors(void* sum, const void* a, const void* b, std::size_t count,
                             const Loop& loop) {
  const std::size_t lanes = hn::Lanes(Wide<T>::kTag);
  const std::size_t whole = count / lanes * lanes;
  auto* const to = static_cast<T*>(sum);
  const auto* const from_a = static_cast<const T*>(a);
  const auto* const from_b = static_cast<const T*>(b);
  loop(to, from_a, from_b, whole);
  const std::size_t rest = (count - whole) * sizeof(T);
  if (rest == 0) return;
  HWY_ALIGN T last_a[hn::MaxLanes(hn::ScalableTag<T>{})] = {};
  HWY_ALIGN T last_b[hn::MaxLanes(hn::ScalableTag<T>{})] = {};
  __builtin_memcpy(last_a, from_a + whole, rest);
  __builtin_memcpy(last_b, from_b + whole, rest);
  loop(last_a, last_a, last_b, lanes);
  __builtin_memcpy(to + whole, last_a, rest);
}

template <typename T>
void AddType(void* sum, const void* a, const void* b, std::size_t count) {
  using W = Wide<T>;
  const std::size_t lanes = hn::Lanes(W::kTag);
  WholeVectors<T>(sum, a, b, count, [lanes](T* to, const T* x, const T* y, std::size_t end) {
    for (std::size_t i = 0; i < end; i += lanes) {
      W::Store(hn::Add(W::Load(x + i), W::Load(y + i)), to + i);
    }
  });
}

template <typename T>
void ScaleType(void* data, std::size_t count, double factor) {
  using W = Wide<T>;
  const std::size_t lanes = hn::Lanes(W::kTag);
  const auto by = hn::Set(W::kTag, static_cast<hn::TFromD<decltype(W::kTag)>>(factor));
  WholeVectors<T>(data, data, data, count, [&](T* to, const T* x, const T*, std::size_t end) {
    for (std::size_t i = 0; i < end; i += lanes) W::Store(hn::Mul(W::Load(x + i), by), to + i);
  });
}

void AddTarget(DataType dtype, void* sum, const void* a, const void* b, std::size_t count) {
  switch (dtype) {
    case DataType::kFloat32:
      return AddType<float>(sum, a, b, count);
    case DataType::kFloat64:
      return AddType<double>(sum, a, b, count);
    case DataType::kFloat16:
      return AddType<hwy::float16_t>(sum, a, b, count);
    case DataType::kBfloat16:
      return AddType<hwy::bfloat16_t>(sum, a, b, count);
    default:
      return;
  }
}

void ScaleTarget(DataType dtype, void* data, std::size_t count, double factor) {
  switch (dtype) {
    case DataType::kFloat32:
      return ScaleType<float>(data, count, factor);
    case DataType::kFloat64:
      return ScaleType<double>(data, count, factor);
    case DataType::kFloat16:
      return ScaleType<hwy::float16_t>(data, count, factor);
    case DataType::kBfloat16:
      return ScaleType<hwy::bfloat16_t>(data, count, factor);
    default:
      return;
  }
}

}  // namespace
}  // namespace gradsync::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradsync::bench {
namespace {
HWY_EXPORT(AverageInPlaceTarget);
HWY_EXPORT(AddTarget);
HWY_EXPORT(ScaleTarget);
}  // namespace

void AverageInPlace(DataType dtype, Prefetch prefetch, std::byte* const* buffers,
                    std::uint32_t ranks, std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(AverageInPlaceTarget)(dtype, prefetch, buffers, ranks, begin, end);
}

void Add(DataType dtype, void* sum, const void* a, const void* b, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(AddTarget)(dtype, sum, a, b, count);
}

void Scale(DataType dtype, void* data, std::size_t count, double factor) {
  HWY_DYNAMIC_DISPATCH(ScaleTarget)(dtype, data, count, factor);
}

}  // namespace gradsync::bench
#endif
