// The one place where the CUDA driver's errors become statuses.

#ifndef DAEMON_CUDA_CUDA_ERRORS_H_
#define DAEMON_CUDA_CUDA_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cuda.h"

namespace gradsync {

// True if `result` stays with the process, in every later call, until it ends (cuda.h: "the process
// must be terminated and relaunched").
bool EndsProcess(CUresult result);

// OK for CUDA_SUCCESS, else, with `call` and the driver's `name` and `text` of the error in it:
//   UNAVAILABLE          GPU_FAULT: EndsProcess; or MPS has ended this client
//   RESOURCE_EXHAUSTED   GPU_OUT_OF_MEMORY; MPS_FULL: no more clients
//   FAILED_PRECONDITION  GPU_UNUSABLE: no device, driver, mode or permission for it
//                        CUDA_DRIVER_TOO_OLD: the driver cannot load the kernels
//   INTERNAL             CUDA_ERROR: anything else, a fault of this program most likely
absl::Status StatusOfCuda(CUresult result, absl::string_view call, absl::string_view name,
                          absl::string_view text);

}  // namespace gradsync

#endif  // DAEMON_CUDA_CUDA_ERRORS_H_
