#include "daemon/worker/cuda_context.h"

namespace gradsync::daemon {

absl::StatusOr<std::unique_ptr<CudaContext>> CudaContext::Open(const CudaDriver* driver,
                                                               const CudaDevice& device) {
  auto context = std::unique_ptr<CudaContext>(new CudaContext(driver, device));
  if (const absl::Status status = context->Make(); !status.ok()) return status;
  return context;
}

absl::Status CudaContext::Make() {
  CUcontext primary = nullptr;
  absl::Status status = driver_->cuDevicePrimaryCtxRetain(&primary, device_.handle);
  if (!status.ok()) return status;
  retained_ = true;
  status = driver_->cuCtxSetCurrent(primary);
  int least = 0;
  int greatest = 0;
  if (status.ok()) status = driver_->cuCtxGetStreamPriorityRange(&least, &greatest);
  for (CUstream* const stream : {&memory_, &combine_, &collective_, &write_back_}) {
    if (status.ok()) {
      status = driver_->cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, greatest);
    }
  }
  return status;
}

CudaContext::~CudaContext() {
  for (CUstream stream : {memory_, combine_, collective_, write_back_}) {
    if (stream != nullptr) driver_->cuStreamDestroy.Result(stream);
  }
  if (retained_) {
    driver_->cuCtxSetCurrent.Result(nullptr);
    driver_->cuDevicePrimaryCtxRelease.Result(device_.handle);
  }
}

}  // namespace gradsync::daemon
