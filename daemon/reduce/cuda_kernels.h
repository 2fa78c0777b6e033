// The kernels of a bucket's reduction on a GPU, as host code launches them: their names and their
// arguments. Plain C++, shared by the kernels (cuda_kernels.cu), the code that launches them
// (cuda_combine.cc) and the tests' fake driver, which runs them on the CPU.
//
// There are two kernels for each bucket type and staging type that CanBeStagedAs allows
// (gpu_staging.h). Their names end in both types, each f32, f64, f16 or bf16:
// gradsync_combine_f32_f32, gradsync_write_back_f32_f32, gradsync_combine_f32_bf16, ... Each kernel
// takes its argument structure by value and runs on a one-dimensional grid of kCudaBlockThreads
// threads a block. The elements of the result do not depend on the number of blocks. A thread takes
// as many elements at a time as fit into 16 bytes of the smaller type.

#ifndef DAEMON_REDUCE_CUDA_KERNELS_H_
#define DAEMON_REDUCE_CUDA_KERNELS_H_

#include <cstdint>

#include "daemon/reduce/gradient_stats.h"

namespace gradsync::daemon {

inline constexpr std::uint32_t kCudaBlockThreads = 512;
inline constexpr std::uint32_t kMaxCudaBlocks = 1024;
// The most buffers of one launch. If more trainers share a GPU, there are several launches.
inline constexpr std::uint32_t kMaxCudaBuffers = 16;

// Staging holds `count` elements and behind them one more, the number of void contributions. It is
// summed over all ranks together with the elements.
//
// staging = sources[0] + sources[1] + ..., in this order; 16-bit types are added in float32. Each
// sum is rounded once, to nearest even. A sum that staging's type cannot hold becomes Inf. Without
// sources, staging becomes zero. All addresses are device addresses, aligned to 16 bytes.
struct CombineArguments {
  const void* sources[kMaxCudaBuffers];
  void* staging;
  std::uint64_t count;
  std::uint32_t source_count;
  std::uint32_t accumulate;          // 1: the rounded content of staging is the sum's first term
  std::uint32_t void_contributions;  // 0 or 1 for each rank here; written behind the elements
};

// Every destination = staging * scale, rounded to the bucket's type.
struct WriteBackArguments {
  const void* staging;
  void* destinations[kMaxCudaBuffers];
  std::uint64_t count;
  double scale;
  // Unless null: one entry for each block of the grid, for the elements that the block has written.
  GradientStats* stats;
  // Set to 1 if the number of void contributions is not 0; else unchanged.
  float* void_flag;
  std::uint32_t destination_count;
};

// The kernels' fat binary, for cuModuleLoadData: embedded by the build.
extern "C" const unsigned char gradsync_cuda_fatbin[];

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_CUDA_KERNELS_H_
