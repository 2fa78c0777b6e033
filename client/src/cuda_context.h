// The primary context of the GPU that a layout lies on: the one that frameworks work in.

#ifndef CLIENT_SRC_CUDA_CONTEXT_H_
#define CLIENT_SRC_CUDA_CONTEXT_H_

#include <cuda.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/cuda_driver.h"

namespace gradsync::client {

// Retained while the object lives; made if the trainer has not. Thread-safe. A forked child does
// not let go of it.
class CudaContext {
 public:
  // Of the GPU or MIG instance `uuid`, written as nvidia-smi -L does.
  //   INVALID_ARGUMENT     MALFORMED: no UUID.
  //   FAILED_PRECONDITION  GPU_NOT_VISIBLE, naming those that are; GPU_UNSUPPORTED.
  //   and the statuses of CudaDriver.
  static absl::StatusOr<std::shared_ptr<CudaContext>> Open(const std::string& uuid);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }

  // Makes it current on this thread, and what was current before again.
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
