// Turns the CUDA driver's errors into statuses. Nothing else does.

#ifndef DAEMON_CUDA_CUDA_ERRORS_H_
#define DAEMON_CUDA_CUDA_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cuda.h"

namespace gradsync::daemon {

// True if every later call of this process returns `result` too, until the process ends (cuda.h:
// "the process must be terminated and relaunched").
bool EndsProcess(CUresult result);

// OK for CUDA_SUCCESS. Otherwise an error whose message has `call` and the driver's `name` and
// `text`:
//   UNAVAILABLE          GPU_FAULT: EndsProcess(result)
//   RESOURCE_EXHAUSTED   GPU_OUT_OF_MEMORY; MPS_FULL: no more clients
//   FAILED_PRECONDITION  GPU_UNUSABLE: there is no device or driver, or the device, its mode or the
//                        permissions do not allow the call
//                        CUDA_DRIVER_TOO_OLD: the driver cannot load the kernels
//   INTERNAL             CUDA_ERROR: anything else, most likely a fault of this program
absl::Status StatusOfCuda(CUresult result, absl::string_view call, absl::string_view name,
                          absl::string_view text);

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_CUDA_ERRORS_H_
