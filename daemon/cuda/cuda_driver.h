// The CUDA driver API as a table of functions, which is filled from libcuda.so.1 at run time. So
// one binary runs on hosts with and without a GPU, and against fakes of the driver.

#ifndef DAEMON_CUDA_CUDA_DRIVER_H_
#define DAEMON_CUDA_CUDA_DRIVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda.h"
#include "cudaTypedefs.h"

// Every function that workers and tools/bench use, with the version of CUDA that introduced the
// signature used here. Open() asks the driver for the function of that version. The newest version
// may have other parameters (cuCtxSynchronize since 13.0), and on new devices the plain symbols of
// some functions fail (cuStreamWriteValue64).
//
// cuStreamWaitValue64 is missing on purpose: only trainers' streams wait for a word.
#define GRADSYNC_CUDA_FUNCTIONS(FUNCTION)        \
  FUNCTION(cuInit, 2000)                         \
  FUNCTION(cuDriverGetVersion, 2020)             \
  FUNCTION(cuGetErrorName, 6000)                 \
  FUNCTION(cuGetErrorString, 6000)               \
  FUNCTION(cuDeviceGetCount, 2000)               \
  FUNCTION(cuDeviceGet, 2000)                    \
  FUNCTION(cuDeviceGetUuid, 11040)               \
  FUNCTION(cuDeviceGetName, 2000)                \
  FUNCTION(cuDeviceGetAttribute, 2000)           \
  FUNCTION(cuDeviceTotalMem, 3020)               \
  FUNCTION(cuMemGetInfo, 3020)                   \
  FUNCTION(cuDevicePrimaryCtxRetain, 7000)       \
  FUNCTION(cuDevicePrimaryCtxRelease, 11000)     \
  FUNCTION(cuCtxSetCurrent, 4000)                \
  FUNCTION(cuCtxGetStreamPriorityRange, 5050)    \
  FUNCTION(cuStreamCreateWithPriority, 5050)     \
  FUNCTION(cuStreamDestroy, 4000)                \
  FUNCTION(cuStreamQuery, 2000)                  \
  FUNCTION(cuStreamSynchronize, 2000)            \
  FUNCTION(cuStreamWaitEvent, 3020)              \
  FUNCTION(cuStreamWriteValue64, 11070)          \
  FUNCTION(cuEventCreate, 2000)                  \
  FUNCTION(cuEventRecord, 2000)                  \
  FUNCTION(cuEventQuery, 2000)                   \
  FUNCTION(cuEventElapsedTime, 2000)             \
  FUNCTION(cuEventDestroy, 4000)                 \
  FUNCTION(cuMemCreate, 10020)                   \
  FUNCTION(cuMemRelease, 10020)                  \
  FUNCTION(cuMemAddressReserve, 10020)           \
  FUNCTION(cuMemAddressFree, 10020)              \
  FUNCTION(cuMemMap, 10020)                      \
  FUNCTION(cuMemUnmap, 10020)                    \
  FUNCTION(cuMemSetAccess, 10020)                \
  FUNCTION(cuMemGetAllocationGranularity, 10020) \
  FUNCTION(cuMemExportToShareableHandle, 10020)  \
  FUNCTION(cuMemAlloc, 3020)                     \
  FUNCTION(cuMemFree, 3020)                      \
  FUNCTION(cuIpcGetMemHandle, 4010)              \
  FUNCTION(cuMemHostRegister, 6050)              \
  FUNCTION(cuMemHostGetDevicePointer, 3020)      \
  FUNCTION(cuMemHostUnregister, 4000)            \
  FUNCTION(cuMemHostAlloc, 2020)                 \
  FUNCTION(cuMemFreeHost, 2000)                  \
  FUNCTION(cuMemcpyAsync, 4000)                  \
  FUNCTION(cuMemsetD8Async, 3020)                \
  FUNCTION(cuModuleLoadData, 2000)               \
  FUNCTION(cuModuleGetFunction, 2000)            \
  FUNCTION(cuModuleUnload, 2000)                 \
  FUNCTION(cuFuncLoad, 12040)                    \
  FUNCTION(cuLaunchKernel, 4000)

namespace gradsync::daemon {

class CudaDriver;

// One function of the table, of a type of cudaTypedefs.h.
template <typename Function>
class CudaFunction;

template <typename... Arguments>
class CudaFunction<CUresult (*)(Arguments...)> {
 public:
  explicit CudaFunction(const CudaDriver* driver, const char* name)
      : driver_(driver), name_(name) {}

  // Calls the function. Statuses as StatusOfCuda (cuda_errors.h).
  absl::Status operator()(Arguments... arguments) const;

  // Calls the function and returns its own result. For calls whose result may be
  // CUDA_ERROR_NOT_READY, which is no error.
  CUresult Result(Arguments... arguments) const { return function_(arguments...); }

 private:
  friend class CudaDriver;

  const CudaDriver* const driver_;
  const char* const name_;
  CUresult (*function_)(Arguments...) = nullptr;
};

// Thread-safe. Open() initializes nothing and needs no GPU, unlike cuInit. The daemon itself never
// calls cuInit, because some CUDA errors last as long as the process.
class CudaDriver {
 public:
  // FAILED_PRECONDITION: CUDA_DRIVER_MISSING without such a library. CUDA_DRIVER_TOO_OLD if it is
  // older than kLeastCudaDriver or lacks a function; the message says what to install.
  static absl::StatusOr<std::unique_ptr<const CudaDriver>> Open(const std::string& path);

  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  absl::Status StatusOf(CUresult result, const char* call) const;
  // The status of cuInit's result: RESOURCE_EXHAUSTED as StatusOfCuda; for all other errors
  // FAILED_PRECONDITION GPU_UNUSABLE, with a message that says what to do. (cuInit returns
  // NO_DEVICE, OPERATING_SYSTEM or UNKNOWN if a device file is missing or not accessible.)
  absl::Status StatusOfInit(CUresult result) const;

  // The functions, as in driver.cuMemAlloc(&address, bytes).
  // NOLINTBEGIN(bugprone-macro-parentheses)
#define GRADSYNC_CUDA_FUNCTION(name, version) \
  CudaFunction<PFN_##name##_v##version> name{this, #name};
  GRADSYNC_CUDA_FUNCTIONS(GRADSYNC_CUDA_FUNCTION)
#undef GRADSYNC_CUDA_FUNCTION
  // NOLINTEND(bugprone-macro-parentheses)

 private:
  CudaDriver() = default;
};

template <typename... Arguments>
absl::Status CudaFunction<CUresult (*)(Arguments...)>::operator()(Arguments... arguments) const {
  const CUresult result = function_(arguments...);
  return result == CUDA_SUCCESS ? absl::OkStatus() : driver_->StatusOf(result, name_);
}

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_CUDA_DRIVER_H_
