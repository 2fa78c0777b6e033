// The primary context of a layout's GPU, which is the context that frameworks use.

#ifndef CLIENT_SRC_CUDA_CONTEXT_H_
#define CLIENT_SRC_CUDA_CONTEXT_H_

#include <cuda.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/cuda_driver.h"

namespace gradsync::client {

// Retains the primary context, and creates it if the trainer has not done so. Thread-safe. The
// destructor releases the context. In a forked child it does nothing.
class CudaContext {
 public:
  // `uuid`: a GPU or a MIG instance, as nvidia-smi -L prints it.
  //   INVALID_ARGUMENT     MALFORMED: not a UUID.
  //   FAILED_PRECONDITION  GPU_NOT_VISIBLE: names the visible GPUs. GPU_UNSUPPORTED.
  //   and the statuses of CudaDriver.
  static absl::StatusOr<std::shared_ptr<CudaContext>> Open(const std::string& uuid);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }

  // Makes the context current on this thread. The destructor restores the previous one.
  class Scope {
   public:
    explicit Scope(const CudaContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    const absl::Status& status() const { return status_; }

   private:
    const CudaDriver& driver_;
    const absl::Status status_;
  };

 private:
  CudaContext(const CudaDriver& driver, CUdevice device, CUcontext context)
      : driver_(driver), device_(device), context_(context) {}

  const CudaDriver& driver_;
  const CUdevice device_;
  CUctx_st* const context_;
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_CUDA_CONTEXT_H_
