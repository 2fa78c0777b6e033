// The part of the CUDA driver API that the client needs: a table of functions from libcuda.so.1,
// opened at run time. A trainer without a GPU needs no driver.

#ifndef CLIENT_SRC_CUDA_DRIVER_H_
#define CLIENT_SRC_CUDA_DRIVER_H_

#include <cuda.h>
#include <cudaTypedefs.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Each function with the version of CUDA that introduced the signature used here. The newest
// version may have other parameters, and new devices refuse the plain symbols of the stream memory
// operations.
#define GRADSYNC_CLIENT_CUDA_FUNCTIONS(FUNCTION)  \
  FUNCTION(cuInit, 2000)                          \
  FUNCTION(cuGetErrorName, 6000)                  \
  FUNCTION(cuGetErrorString, 6000)                \
  FUNCTION(cuDeviceGetCount, 2000)                \
  FUNCTION(cuDeviceGet, 2000)                     \
  FUNCTION(cuDeviceGetUuid, 11040)                \
  FUNCTION(cuDeviceGetName, 2000)                 \
  FUNCTION(cuDeviceGetAttribute, 2000)            \
  FUNCTION(cuDevicePrimaryCtxRetain, 7000)        \
  FUNCTION(cuDevicePrimaryCtxRelease, 11000)      \
  FUNCTION(cuCtxPushCurrent, 4000)                \
  FUNCTION(cuCtxPopCurrent, 4000)                 \
  FUNCTION(cuCtxSynchronize, 2000)                \
  FUNCTION(cuMemImportFromShareableHandle, 10020) \
  FUNCTION(cuMemRelease, 10020)                   \
  FUNCTION(cuMemAddressReserve, 10020)            \
  FUNCTION(cuMemAddressFree, 10020)               \
  FUNCTION(cuMemMap, 10020)                       \
  FUNCTION(cuMemUnmap, 10020)                     \
  FUNCTION(cuMemSetAccess, 10020)                 \
  FUNCTION(cuIpcOpenMemHandle, 11000)             \
  FUNCTION(cuIpcCloseMemHandle, 4010)             \
  FUNCTION(cuMemHostRegister, 6050)               \
  FUNCTION(cuMemHostGetDevicePointer, 3020)       \
  FUNCTION(cuMemHostUnregister, 4000)             \
  FUNCTION(cuMemsetD8Async, 3020)                 \
  FUNCTION(cuMemsetD32Async, 3020)                \
  FUNCTION(cuEventCreate, 2000)                   \
  FUNCTION(cuEventRecord, 2000)                   \
  FUNCTION(cuEventDestroy, 4000)                  \
  FUNCTION(cuStreamWaitEvent, 3020)               \
  FUNCTION(cuStreamWaitValue64, 11070)            \
  FUNCTION(cuStreamWriteValue64, 11070)           \
  FUNCTION(cuStreamIsCapturing, 10000)

namespace gradsync::client {

// Thread-safe. One per process: the first Get opens it, and nothing closes it.
class CudaDriver {
 public:
  // The initialized driver of this process: libcuda.so.1, or the file that the environment variable
  // GRADSYNC_CUDA_LIBRARY names.
  //   FAILED_PRECONDITION  CUDA_DRIVER_MISSING. CUDA_DRIVER_TOO_OLD: names a missing function.
  //                        GPU_UNUSABLE: no GPU can be opened; the message says what to check.
  //   RESOURCE_EXHAUSTED   as Check.
  static absl::StatusOr<const CudaDriver*> Get();

  // The status for `result`, which the CUDA function `call` returned.
  //   UNAVAILABLE          GPU_FAULT: no CUDA call of this process will work again.
  //   RESOURCE_EXHAUSTED   GPU_OUT_OF_MEMORY. MPS_FULL: MPS takes no more clients.
  //   FAILED_PRECONDITION  GPU_UNUSABLE: no device, or it refuses this process. CAPTURING.
  //   INVALID_ARGUMENT     BAD_STREAM: the driver refused the handle. It may crash instead.
  //   INTERNAL             CUDA_ERROR.
  absl::Status Check(CUresult result, absl::string_view call) const;

  // The functions.
#define GRADSYNC_CLIENT_CUDA_FUNCTION(name, version) PFN_##name##_v##version name = nullptr;
  GRADSYNC_CLIENT_CUDA_FUNCTIONS(GRADSYNC_CLIENT_CUDA_FUNCTION)
#undef GRADSYNC_CLIENT_CUDA_FUNCTION

 private:
  CudaDriver() = default;
  static absl::StatusOr<const CudaDriver*> Open();
};

}  // namespace gradsync::client

#endif  // CLIENT_SRC_CUDA_DRIVER_H_
