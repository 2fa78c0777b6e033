// A bucket's reduction on a GPU; what each kernel does is said in cuda_kernels.h. Memory bounds
// them: every access is of 16 bytes, neighbours read neighbours, and the loads of several sources
// are under way at once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "daemon/reduce/cuda_kernels.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint32_t kVectorBytes = 16;
constexpr std::uint32_t kLoadsUnderWay = 4;
constexpr std::uint32_t kWarpThreads = 32;

// The type in which elements are added and scaled.
template <typename T>
struct WorkOf {
  using Type = float;
};
template <>
struct WorkOf<double> {
  using Type = double;
};
template <typename T>
using Work = typename WorkOf<T>::Type;

__device__ float Widen(float x) { return x; }
__device__ double Widen(double x) { return x; }
__device__ float Widen(__half x) { return __half2float(x); }
__device__ float Widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// To nearest even; too large becomes Inf.
template <typename T>
__device__ T Narrow(Work<T> x) {
  return x;
}
template <>
__device__ __half Narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 Narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N consecutive elements: 16 bytes at a time, except for single ones.
template <typename T, std::uint32_t N>
__device__ void Load(const T* from, T (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = *from;
  } else {
    static_assert(sizeof(to) % kVectorBytes == 0, "whole vectors");
    constexpr std::uint32_t kElements = kVectorBytes / sizeof(T);
#pragma unroll
    for (std::uint32_t i = 0; i < N; i += kElements) {
      const uint4 vector = *reinterpret_cast<const uint4*>(from + i);
      memcpy(to + i, &vector, kVectorBytes);
    }
  }
}
template <typename T, std::uint32_t N>
__device__ void Store(const T (&from)[N], T* to) {
  if constexpr (N == 1) {
    *to = from[0];
  } else {
    static_assert(sizeof(from) % kVectorBytes == 0, "whole vectors");
    constexpr std::uint32_t kElements = kVectorBytes / sizeof(T);
#pragma unroll
    for (std::uint32_t i = 0; i < N; i += kElements) {
      uint4 vector;
      memcpy(&vector, from + i, kVectorBytes);
      *reinterpret_cast<uint4*>(to + i) = vector;
    }
  }
}

// Elements that a thread takes at a time: 16 bytes of the smaller type.
template <typename T, typename Staging>
constexpr std::uint32_t kElements = kVectorBytes /
                                    (sizeof(T) < sizeof(Staging) ? sizeof(T) : sizeof(Staging));

__device__ std::uint64_t FirstIndex() {
  return static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::uint64_t IndexStride() {
  return static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
}

// Elements [first, first + N) of the sum.
template <typename T, typename Staging, std::uint32_t N>
__device__ void CombineAt(const CombineArguments& arguments, std::uint64_t first) {
  Staging* const staging = static_cast<Staging*>(arguments.staging) + first;
  Staging staged[N];
  Work<T> sum[N];
  if (arguments.accumulate) {
    Load(staging, staged);
#pragma unroll
    for (std::uint32_t i = 0; i < N; ++i) sum[i] = Widen(staged[i]);
  } else {
    // -0 + x is x, for every x.
    const Work<T> begin = arguments.source_count > 0 ? Work<T>(-0.0) : Work<T>(0);
#pragma unroll
    for (std::uint32_t i = 0; i < N; ++i) sum[i] = begin;
  }
  for (std::uint32_t source = 0; source < arguments.source_count; source += kLoadsUnderWay) {
    T loaded[kLoadsUnderWay][N];
#pragma unroll
    for (std::uint32_t j = 0; j < kLoadsUnderWay; ++j) {
      if (source + j < arguments.source_count) {
        Load(static_cast<const T*>(arguments.sources[source + j]) + first, loaded[j]);
      }
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kLoadsUnderWay; ++j) {
      if (source + j < arguments.source_count) {
#pragma unroll
        for (std::uint32_t i = 0; i < N; ++i) sum[i] += Widen(loaded[j][i]);
      }
    }
  }
#pragma unroll
  for (std::uint32_t i = 0; i < N; ++i) staged[i] = Narrow<Staging>(sum[i]);
  Store(staged, staging);
}

template <typename T, typename Staging>
__device__ void Combine(const CombineArguments& arguments) {
  constexpr std::uint32_t kTaken = kElements<T, Staging>;
  const std::uint64_t vectors = arguments.count / kTaken;
  for (std::uint64_t i = FirstIndex(); i < vectors; i += IndexStride()) {
    CombineAt<T, Staging, kTaken>(arguments, i * kTaken);
  }
  const std::uint64_t rest = vectors * kTaken + FirstIndex();
  if (rest < arguments.count) CombineAt<T, Staging, 1>(arguments, rest);
  if (FirstIndex() == 0) {
    static_cast<Staging*>(arguments.staging)[arguments.count] =
        Narrow<Staging>(static_cast<Work<T>>(arguments.void_contributions));
  }
}

// Adds up a block's statistics and writes them to the block's place. Always in the same order: the
// same grid gives the same bits.
__device__ void WriteStats(GradientStats mine, GradientStats* stats) {
  constexpr std::uint32_t kWarps = kCudaBlockThreads / kWarpThreads;
  __shared__ double sums[kWarps];
  __shared__ unsigned long long counts[kWarps];
  unsigned long long count = mine.non_finite;
  double sum = mine.sum_of_squares;
  for (std::uint32_t distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, distance);
    count += __shfl_down_sync(0xffffffffu, count, distance);
  }
  if (threadIdx.x % kWarpThreads == 0) {
    sums[threadIdx.x / kWarpThreads] = sum;
    counts[threadIdx.x / kWarpThreads] = count;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (std::uint32_t warp = 1; warp < kWarps; ++warp) {
    sum += sums[warp];
    count += counts[warp];
  }
  stats[blockIdx.x].sum_of_squares = sum;
  stats[blockIdx.x].non_finite = count;
}

// Elements [first, first + N) of every destination; adds to `stats`.
template <typename T, typename Staging, std::uint32_t N>
__device__ void WriteBackAt(const WriteBackArguments& arguments, std::uint64_t first,
                            GradientStats* stats) {
  Staging staged[N];
  Load(static_cast<const Staging*>(arguments.staging) + first, staged);
  T result[N];
#pragma unroll
  for (std::uint32_t i = 0; i < N; ++i) {
    result[i] = Narrow<T>(Widen(staged[i]) * static_cast<Work<T>>(arguments.scale));
    const double written = Widen(result[i]);
    stats->sum_of_squares += written * written;
    stats->non_finite += isfinite(written) ? 0 : 1;
  }
  for (std::uint32_t i = 0; i < arguments.destination_count; ++i) {
    Store(result, static_cast<T*>(arguments.destinations[i]) + first);
  }
}

template <typename T, typename Staging>
__device__ void WriteBack(const WriteBackArguments& arguments) {
  constexpr std::uint32_t kTaken = kElements<T, Staging>;
  GradientStats stats;
  const std::uint64_t vectors = arguments.count / kTaken;
  for (std::uint64_t i = FirstIndex(); i < vectors; i += IndexStride()) {
    WriteBackAt<T, Staging, kTaken>(arguments, i * kTaken, &stats);
  }
  const std::uint64_t rest = vectors * kTaken + FirstIndex();
  if (rest < arguments.count) WriteBackAt<T, Staging, 1>(arguments, rest, &stats);
  if (FirstIndex() == 0 &&
      Widen(static_cast<const Staging*>(arguments.staging)[arguments.count]) != 0) {
    *arguments.void_flag = 1.0f;
  }
  if (arguments.stats != nullptr) WriteStats(stats, arguments.stats);
}

}  // namespace
}  // namespace gradsync::daemon

#define GRADSYNC_KERNELS(name, Type, Staging)                                    \
  extern "C" __global__ void __launch_bounds__(gradsync::daemon::kCudaBlockThreads)      \
      gradsync_combine_##name(const gradsync::daemon::CombineArguments arguments) {      \
    gradsync::daemon::Combine<Type, Staging>(arguments);                                 \
  }                                                                              \
  extern "C" __global__ void __launch_bounds__(gradsync::daemon::kCudaBlockThreads)      \
      gradsync_write_back_##name(const gradsync::daemon::WriteBackArguments arguments) { \
    gradsync::daemon::WriteBack<Type, Staging>(arguments);                               \
  }

GRADSYNC_KERNELS(f32_f32, float, float)
GRADSYNC_KERNELS(f32_f16, float, __half)
GRADSYNC_KERNELS(f32_bf16, float, __nv_bfloat16)
GRADSYNC_KERNELS(f64_f64, double, double)
GRADSYNC_KERNELS(f16_f16, __half, __half)
GRADSYNC_KERNELS(f16_f32, __half, float)
GRADSYNC_KERNELS(bf16_bf16, __nv_bfloat16, __nv_bfloat16)
GRADSYNC_KERNELS(bf16_f32, __nv_bfloat16, float)
