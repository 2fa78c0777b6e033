// A bucket's reduction on a GPU; cuda_kernels.h says what each kernel does. Memory bounds them:
// every access is of 16 bytes, neighbours read neighbours, and the loads of several sources are
// under way at once.

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

// Adds elements [first, first + N) of every source to `sum`, in the order of the sources.
template <typename T, std::uint32_t N, typename Source>
__device__ void AddTo(Work<T> (&sum)[N], Source const* sources, std::uint32_t count,
                      std::uint64_t first) {
  for (std::uint32_t source = 0; source < count; source += kLoadsUnderWay) {
    T loaded[kLoadsUnderWay][N];
#pragma unroll
    for (std::uint32_t j = 0; j < kLoadsUnderWay; ++j) {
      if (source + j < count) Load(static_cast<const T*>(sources[source + j]) + first, loaded[j]);
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kLoadsUnderWay; ++j) {
      if (source + j < count) {
#pragma unroll
        for (std::uint32_t i = 0; i < N; ++i) sum[i] += Widen(loaded[j][i]);
      }
    }
  }
}

// What a sum of `terms` terms begins with: -0 + x is x, for every x.
template <typename T>
__device__ Work<T> Begin(std::uint32_t terms) {
  return terms > 0 ? Work<T>(-0.0) : Work<T>(0);
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
#pragma unroll
    for (std::uint32_t i = 0; i < N; ++i) sum[i] = Begin<T>(arguments.source_count);
  }
  AddTo<T>(sum, arguments.sources, arguments.source_count, first);
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

// Writes elements [first, first + N) of every destination, and adds them to `stats`.
template <typename T, std::uint32_t N>
__device__ void WriteAt(const AverageOutput& output, const Work<T> (&sum)[N], double scale,
                        std::uint64_t first, GradientStats* stats) {
  T result[N];
#pragma unroll
  for (std::uint32_t i = 0; i < N; ++i) {
    result[i] = Narrow<T>(sum[i] * static_cast<Work<T>>(scale));
    const double written = Widen(result[i]);
    stats->sum_of_squares += written * written;
    stats->non_finite += isfinite(written) ? 0 : 1;
  }
  for (std::uint32_t i = 0; i < output.destination_count; ++i) {
    Store(result, static_cast<T*>(output.destinations[i]) + first);
  }
}

// Writes verdicts and statistics. Every thread calls it once.
__device__ void Report(const AverageOutput& output, bool is_void, const GradientStats& stats) {
  if (FirstIndex() == 0) {
    const float verdict = is_void ? 1.0f : 0.0f;
    *output.void_flag = verdict;
    if (output.writes_verdict) {
      for (std::uint32_t i = 0; i < output.destination_count; ++i) {
        char* const destination = static_cast<char*>(output.destinations[i]);
        *reinterpret_cast<float*>(destination + output.verdict_distance) = verdict;
      }
    }
  }
  if (output.stats != nullptr) WriteStats(stats, output.stats);
}

template <typename T, typename Staging, std::uint32_t N>
__device__ void WriteBackAt(const WriteBackArguments& arguments, std::uint64_t first,
                            GradientStats* stats) {
  Staging staged[N];
  Load(static_cast<const Staging*>(arguments.staging) + first, staged);
  Work<T> sum[N];
#pragma unroll
  for (std::uint32_t i = 0; i < N; ++i) sum[i] = Widen(staged[i]);
  WriteAt<T>(arguments.output, sum, arguments.scale, first, stats);
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
  Report(arguments.output,
         Widen(static_cast<const Staging*>(arguments.staging)[arguments.count]) != 0, stats);
}

template <typename T, std::uint32_t N>
__device__ void AverageAt(const AverageArguments& arguments, std::uint64_t first,
                          GradientStats* stats) {
  const AverageOutput& output = arguments.output;
  Work<T> sum[N];
#pragma unroll
  for (std::uint32_t i = 0; i < N; ++i) sum[i] = Begin<T>(output.destination_count);
  AddTo<T>(sum, output.destinations, output.destination_count, first);
  WriteAt<T>(output, sum, arguments.scale, first, stats);
}

template <typename T>
__device__ void Average(const AverageArguments& arguments) {
  constexpr std::uint32_t kTaken = kElements<T, T>;
  GradientStats stats;
  const std::uint64_t vectors = arguments.count / kTaken;
  for (std::uint64_t i = FirstIndex(); i < vectors; i += IndexStride()) {
    AverageAt<T, kTaken>(arguments, i * kTaken, &stats);
  }
  const std::uint64_t rest = vectors * kTaken + FirstIndex();
  if (rest < arguments.count) AverageAt<T, 1>(arguments, rest, &stats);
  Report(arguments.output, arguments.void_contributions != 0, stats);
}

}  // namespace
}  // namespace gradsync::daemon

#define GRADSYNC_KERNEL(name, Arguments)                                            \
  extern "C" __global__ void __launch_bounds__(gradsync::daemon::kCudaBlockThreads) \
      gradsync_##name(const gradsync::daemon::Arguments arguments)

#define GRADSYNC_STAGED(types, Type, Staging)               \
  GRADSYNC_KERNEL(combine_##types, CombineArguments) {      \
    gradsync::daemon::Combine<Type, Staging>(arguments);    \
  }                                                         \
  GRADSYNC_KERNEL(write_back_##types, WriteBackArguments) { \
    gradsync::daemon::WriteBack<Type, Staging>(arguments);  \
  }
#define GRADSYNC_IN_PLACE(type, Type) \
  GRADSYNC_KERNEL(average_##type, AverageArguments) { gradsync::daemon::Average<Type>(arguments); }

GRADSYNC_STAGED(f32_f32, float, float)
GRADSYNC_STAGED(f32_f16, float, __half)
GRADSYNC_STAGED(f32_bf16, float, __nv_bfloat16)
GRADSYNC_STAGED(f64_f64, double, double)
GRADSYNC_STAGED(f16_f16, __half, __half)
GRADSYNC_STAGED(f16_f32, __half, float)
GRADSYNC_STAGED(bf16_bf16, __nv_bfloat16, __nv_bfloat16)
GRADSYNC_STAGED(bf16_f32, __nv_bfloat16, float)
GRADSYNC_IN_PLACE(f32, float)
GRADSYNC_IN_PLACE(f64, double)
GRADSYNC_IN_PLACE(f16, __half)
GRADSYNC_IN_PLACE(bf16, __nv_bfloat16)
