// The kernels of a bucket's reduction on a GPU, as host code launches them: their names and their
// arguments. Plain C++, shared by the kernels (cuda_kernels.cu), the code that launches them
// (cuda_combine.cc) and the tests' fake driver, which runs them on the CPU.
//
// A bucket needs two kernels if other GPUs take part, or if more than kMaxCudaBuffers ranks share
// this GPU. combine adds up this GPU's ranks into staging. write_back writes the result (NCCL's, if
// other GPUs take part) from staging to these ranks. Both kernels exist for each pair of bucket
// type and staging type that CanBeStagedAs allows (gpu_staging.h). Their names end in the two
// types, each f32, f64, f16 or bf16: gradsync_combine_f32_f32, gradsync_write_back_f32_f32,
// gradsync_combine_f32_bf16, ... Otherwise a bucket needs one kernel, and no staging:
// gradsync_average_f32 and so on, for each bucket type.
//
// Each kernel takes its argument structure by value and runs on a one-dimensional grid of
// kCudaBlockThreads threads a block. The elements of the result do not depend on the number of
// blocks. A thread takes as many elements at a time as fit into 16 bytes of the smaller type.

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
  std::uint32_t void_contributions;  // not 0 if the step is void here; written behind the elements
};

// Where an average goes, and what is reported about it.
struct AverageOutput {
  void* destinations[kMaxCudaBuffers];
  // Bytes from each destination to a float that becomes 1 if the step is void, else 0.
  std::int64_t verdict_distance;
  // Unless null: one entry for each block of the grid, for the elements that the block has written.
  GradientStats* stats;
  // Becomes 1 if the number of void contributions is not 0, else 0.
  float* void_flag;
  std::uint32_t destination_count;
  std::uint32_t writes_verdict;  // 0: there is no such float for this bucket
};

// Every destination = staging * scale, rounded to the bucket's type.
struct WriteBackArguments {
  const void* staging;
  std::uint64_t count;
  double scale;
  AverageOutput output;
};

// Every destination = (destinations[0] + destinations[1] + ...) * scale: the bits of combine and
// write_back with staging in the type in which elements are added. Each thread reads its elements
// of all destinations before it writes them.
struct AverageArguments {
  std::uint64_t count;
  double scale;
  AverageOutput output;
  std::uint32_t void_contributions;
};

// The kernels' fat binary, for cuModuleLoadData: embedded by the build.
extern "C" const unsigned char gradsync_cuda_fatbin[];

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_CUDA_KERNELS_H_
