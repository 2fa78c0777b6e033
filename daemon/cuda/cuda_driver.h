// The CUDA driver API as a table of functions, filled from libcuda.so.1 at run time: one binary
// runs on hosts with and without a GPU, and against fakes of the driver.

#ifndef DAEMON_CUDA_CUDA_DRIVER_H_
#define DAEMON_CUDA_CUDA_DRIVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"

// Every function in use, by the name that cuGetProcAddress takes: without "_v2", which it adds
// according to the version (the plain symbol of cuStreamWaitValue64 is one that new devices
// refuse).
#define GRADSYNC_CUDA_FUNCTIONS(FUNCTION) \
  FUNCTION(cuInit)                        \
  FUNCTION(cuDriverGetVersion)            \
  FUNCTION(cuGetErrorName)                \
  FUNCTION(cuGetErrorString)              \
  FUNCTION(cuDeviceGetCount)              \
  FUNCTION(cuDeviceGet)                   \
  FUNCTION(cuDeviceGetUuid)               \
  FUNCTION(cuDeviceGetName)               \
  FUNCTION(cuDeviceGetAttribute)          \
  FUNCTION(cuDeviceTotalMem)              \
  FUNCTION(cuMemGetInfo)                  \
  FUNCTION(cuDevicePrimaryCtxRetain)      \
  FUNCTION(cuDevicePrimaryCtxRelease)     \
  FUNCTION(cuCtxSetCurrent)               \
  FUNCTION(cuCtxGetStreamPriorityRange)   \
  FUNCTION(cuStreamCreateWithPriority)    \
  FUNCTION(cuStreamDestroy)               \
  FUNCTION(cuStreamSynchronize)           \
  FUNCTION(cuStreamQuery)                 \
  FUNCTION(cuStreamWaitEvent)             \
  FUNCTION(cuStreamWaitValue64)           \
  FUNCTION(cuStreamWriteValue64)          \
  FUNCTION(cuEventCreate)                 \
  FUNCTION(cuEventRecord)                 \
  FUNCTION(cuEventQuery)                  \
  FUNCTION(cuEventSynchronize)            \
  FUNCTION(cuEventElapsedTime)            \
  FUNCTION(cuEventDestroy)                \
  FUNCTION(cuMemCreate)                   \
  FUNCTION(cuMemRelease)                  \
  FUNCTION(cuMemAddressReserve)           \
  FUNCTION(cuMemAddressFree)              \
  FUNCTION(cuMemMap)                      \
  FUNCTION(cuMemUnmap)                    \
  FUNCTION(cuMemSetAccess)                \
  FUNCTION(cuMemGetAllocationGranularity) \
  FUNCTION(cuMemExportToShareableHandle)  \
  FUNCTION(cuMemAlloc)                    \
  FUNCTION(cuMemFree)                     \
  FUNCTION(cuIpcGetMemHandle)             \
  FUNCTION(cuMemHostRegister)             \
  FUNCTION(cuMemHostGetDevicePointer)     \
  FUNCTION(cuMemHostUnregister)           \
  FUNCTION(cuMemHostAlloc)                \
  FUNCTION(cuMemFreeHost)                 \
  FUNCTION(cuMemcpyAsync)                 \
  FUNCTION(cuMemcpyHtoDAsync)             \
  FUNCTION(cuMemcpyDtoHAsync)             \
  FUNCTION(cuMemsetD8Async)               \
  FUNCTION(cuMemsetD32Async)              \
  FUNCTION(cuModuleLoadData)              \
  FUNCTION(cuModuleGetFunction)           \
  FUNCTION(cuModuleUnload)                \
  FUNCTION(cuFuncLoad)                    \
  FUNCTION(cuLaunchKernel)

namespace gradsync {

class CudaDriver;

// One function of the table, of the type that cuda.h declares.
template <typename Function>
class CudaFunction;

template <typename... Arguments>
class CudaFunction<CUresult(Arguments...)> {
 public:
  explicit CudaFunction(const CudaDriver* driver, const char* name)
      : driver_(driver), name_(name) {}

  // Calls it; statuses as StatusOfCuda (cuda_errors.h).
  absl::Status operator()(Arguments... arguments) const;

  // Calls it, for results that are no errors, such as CUDA_ERROR_NOT_READY.
  CUresult Result(Arguments... arguments) const { return function_(arguments...); }

 private:
  friend class CudaDriver;

  const CudaDriver* const driver_;
  const char* const name_;
  CUresult (*function_)(Arguments...) = nullptr;
};

// Thread-safe. Opening it initializes nothing and needs no GPU: that is cuInit, which the daemon
// itself never calls (design: a CUDA error can be sticky for a whole process).
class CudaDriver {
 public:
  // NOT_FOUND if there is no such library: CUDA_DRIVER_MISSING. FAILED_PRECONDITION if it lacks a
  // function: CUDA_DRIVER_TOO_OLD, naming the functions.
  static absl::StatusOr<std::unique_ptr<const CudaDriver>> Open(const std::string& library);

  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  absl::Status StatusOf(CUresult result, const char* call) const;

  // The functions, as in driver.cuMemAlloc(&address, bytes).
#define GRADSYNC_CUDA_FUNCTION(name) CudaFunction<decltype(::name)> name{this, #name};
  GRADSYNC_CUDA_FUNCTIONS(GRADSYNC_CUDA_FUNCTION)
#undef GRADSYNC_CUDA_FUNCTION

 private:
  CudaDriver() = default;
};

template <typename... Arguments>
absl::Status CudaFunction<CUresult(Arguments...)>::operator()(Arguments... arguments) const {
  const CUresult result = function_(arguments...);
  return result == CUDA_SUCCESS ? absl::OkStatus() : driver_->StatusOf(result, name_);
}

}  // namespace gradsync

#endif  // DAEMON_CUDA_CUDA_DRIVER_H_
