// The kernels of a bucket's reduction on a GPU, as host code launches them: their names and their
// arguments. Plain C++, shared by the kernels (cuda_kernels.cu), what launches them
// (cuda_combine.cc) and the tests' fake of the driver, which runs them on the CPU.
//
// Names, for each type of a bucket and of its staging (gpu_staging.h: CanBeStagedAs), which are
// f32, f64, f16 or bf16: gradsync_combine_f32_f32, gradsync_write_back_f32_f32,
// gradsync_combine_f32_bf16, ... Each takes its argument structure by value and is launched on a
// one-dimensional grid of kCudaBlockThreads threads a block; any number of blocks gives the same
// elements. A thread takes as many at a time as 16 bytes hold of the smaller of the two types.

#ifndef DAEMON_REDUCE_CUDA_KERNELS_H_
#define DAEMON_REDUCE_CUDA_KERNELS_H_

#include <cstdint>

#include "daemon/reduce/bucket_numbers.h"

namespace gradsync {

inline constexpr std::uint32_t kCudaBlockThreads = 512;
inline constexpr std::uint32_t kMaxCudaBlocks = 1024;
// Buffers of one launch. Should more trainers share a GPU, there is one launch for each so many.
inline constexpr std::uint32_t kMaxCudaBuffers = 16;

// Staging holds `count` elements and behind them one more: the number of void contributions, which
// is summed over all ranks with the others.
//
// staging = sources[0] + sources[1] + ..., in this order; 16-bit types are added in float32. Each
// sum is rounded once, to nearest even; what staging's type cannot hold becomes Inf. Zeros without
// sources. All addresses are the device's and aligned to 16 bytes.
struct CombineArguments {
  const void* sources[kMaxCudaBuffers];
  void* staging;
  std::uint64_t count;
  std::uint32_t source_count;
  std::uint32_t accumulate;          // 1: what staging holds, rounded, comes first in the sum
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
};

// The kernels' fat binary, for cuModuleLoadData: embedded by the build.
extern "C" const unsigned char gradsync_cuda_fatbin[];

}  // namespace gradsync

#endif  // DAEMON_REDUCE_CUDA_KERNELS_H_
