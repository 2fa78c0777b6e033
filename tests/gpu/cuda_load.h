// Work for a GPU: repeated runs of the product's combine kernel, on a limited number of processors.

#ifndef TESTS_GPU_CUDA_LOAD_H_
#define TESTS_GPU_CUDA_LOAD_H_

#include <cuda.h>

#include <cstdint>

#include "daemon/reduce/cuda_kernels.h"

namespace gradsync::gpu {

// Runs in the current context, on a stream of its own. The kernel adds `source` to itself. If
// `source` is 0, the object allocates memory for it. Nothing is freed before the process ends.
class CudaLoad {
 public:
  CudaLoad(std::uint32_t blocks, std::uint64_t floats, CUdeviceptr source = 0);

  // Enqueues one kernel.
  CUresult Enqueue();
  // Waits until all enqueued kernels are done.
  CUresult Finish() { return cuStreamSynchronize(stream_); }
  // Enqueues kernels for `milliseconds`, a few at a time, and waits for them.
  CUresult RunFor(double milliseconds);
  // Enqueues all `kernels` at once. Returns how many milliseconds they take.
  double TimeMs(int kernels);
  // The first float of the last sum.
  float Sum();

 private:
  const std::uint32_t blocks_;
  daemon::CombineArguments arguments_{};
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
};

// True if the device of the current context says that MPS serves it.
bool UnderMps();

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_CUDA_LOAD_H_
