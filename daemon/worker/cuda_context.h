// A worker's context on its GPU.

#ifndef DAEMON_WORKER_CUDA_CONTEXT_H_
#define DAEMON_WORKER_CUDA_CONTEXT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "cuda.h"
#include "daemon/cuda/cuda_device.h"
#include "daemon/cuda/cuda_driver.h"

namespace gradsync::daemon {

// The primary context of a device, current in the thread that opened it, and the worker's streams.
//
// All streams have the highest priority, so that under MPS a bucket gets the GPU's multiprocessors
// before the backward pass that is still running. No stream ever waits for a trainer's word: it
// would block a hardware queue that other streams share.
//
// For the issuing thread alone. Destroy it after everything that was made in it.
class CudaContext {
 public:
  static absl::StatusOr<std::unique_ptr<CudaContext>> Open(const CudaDriver* driver,
                                                           const CudaDevice& device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver* driver() const { return driver_; }
  const CudaDevice& device() const { return device_; }

  CUstream memory_stream() const { return memory_; }          // zeroing of new memory
  CUstream combine_stream() const { return combine_; }        // the sum of the local ranks
  CUstream collective_stream() const { return collective_; }  // NCCL
  CUstream write_back_stream() const { return write_back_; }  // results and done words

 private:
  CudaContext(const CudaDriver* driver, const CudaDevice& device)
      : driver_(driver), device_(device) {}

  absl::Status Make();

  const CudaDriver* const driver_;
  const CudaDevice device_;
  bool retained_ = false;
  CUstream memory_ = nullptr;
  CUstream combine_ = nullptr;
  CUstream collective_ = nullptr;
  CUstream write_back_ = nullptr;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_CUDA_CONTEXT_H_
