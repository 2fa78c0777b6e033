// Work for a GPU: the product's combine kernel, again and again, on as few of its processors as
// asked for.

#ifndef TESTS_GPU_CUDA_LOAD_H_
#define TESTS_GPU_CUDA_LOAD_H_

#include <cuda.h>

#include <cstdint>

#include "daemon/reduce/cuda_kernels.h"

namespace gradsync::gpu {

// In the context that is current, on a stream of its own. `source` is added to itself; 0: memory of
// its own. Nothing is freed: the process ends.
class CudaLoad {
 public:
  CudaLoad(std::uint32_t blocks, std::uint64_t floats, CUdeviceptr source = 0);

  // Enqueues one kernel.
  CUresult Enqueue();
  // Until all that was enqueued is done.
  CUresult Finish() { return cuStreamSynchronize(stream_); }
  // Enqueues kernels until `milliseconds` have gone, a few at a time; waits for them.
  CUresult RunFor(double milliseconds);
  // Milliseconds that `kernels` take, enqueued at once.
  double TimeMs(int kernels);
  // The first float of the last sum.
  float Sum();

 private:
  const std::uint32_t blocks_;
  CombineArguments arguments_{};
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
};

// The device's answer, of the context that is current: whether it is an MPS client.
bool UnderMps();

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_CUDA_LOAD_H_
