// The kernels of a bucket's reduction on a GPU, as host code launches them: their names and their
// arguments. Plain C++, shared by the kernels (cuda_kernels.cu), what launches them
// (cuda_combine.cc) and the tests' fake of the driver, which runs them on the CPU.
//
// Names, for each bucket type f32, f64, f16, bf16: gradsync_combine_f32, gradsync_write_back_f32,
// ... Each takes its argument structure by value and is launched on a one-dimensional grid of
// kCudaBlockThreads threads a block; any number of blocks gives the same elements.

#ifndef DAEMON_REDUCE_CUDA_KERNELS_H_
#define DAEMON_REDUCE_CUDA_KERNELS_H_

#include <cstdint>

#include "daemon/reduce/bucket_numbers.h"

namespace gradsync {

inline constexpr std::uint32_t kCudaBlockThreads = 512;
inline constexpr std::uint32_t kMaxCudaBlocks = 1024;
// Buffers of one launch. Should more trainers share a GPU, there is one launch for each so many.
inline constexpr std::uint32_t kMaxCudaBuffers = 16;

// Staging holds `count` elements of the bucket's type, or of float32 if `wide` (16-bit types only),
// and behind them one more: the number of void contributions, which is summed over all ranks with
// the others.
//
// staging = sources[0] + sources[1] + ..., in this order; 16-bit types are added in float32. Zeros
// without sources. All addresses are the device's and aligned to 16 bytes.
struct CombineArguments {
  const void* sources[kMaxCudaBuffers];
  void* staging;
  std::uint64_t count;
  std::uint32_t source_count;
  std::uint32_t accumulate;          // 1: what staging holds already comes first in the sum
  std::uint32_t wide;                // 1: staging is float32
  std::uint32_t void_contributions;  // 0 or 1 for each rank here; written behind the elements
};

// Every destination = staging * scale, rounded to the bucket's type.
struct WriteBackArguments {
  const void* staging;
  void* destinations[kMaxCudaBuffers];
  std::uint64_t count;
  double scale;
  // Unless null: one for each block of the grid, of the elements that the block has written.
  BucketNumbers* numbers;
  // Set to 1 if the number of void contributions is not 0; else left as it is.
  float* void_flag;
  std::uint32_t destination_count;
  std::uint32_t wide;  // 1: staging is float32
};

// The kernels' fat binary, for cuModuleLoadData: embedded by the build.
extern "C" const unsigned char gradsync_cuda_fatbin[];

}  // namespace gradsync

#endif  // DAEMON_REDUCE_CUDA_KERNELS_H_
