// Turns NCCL's errors into statuses. Nothing else does.

#ifndef DAEMON_CUDA_NCCL_ERRORS_H_
#define DAEMON_CUDA_NCCL_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nccl.h"

namespace gradsync::daemon {

// OK for ncclSuccess and ncclInProgress. Otherwise an error whose message has `call` and NCCL's
// `text` and `last_error`:
//   UNAVAILABLE  NCCL_REMOTE_LOST: a remote rank, or the network to it, is lost; or a system call
//                inside NCCL failed
//                NCCL_CUDA_ERROR: a CUDA call inside NCCL failed
//   INTERNAL     NCCL_ERROR: a fault of NCCL or of this program
absl::Status StatusOfNccl(ncclResult_t result, absl::string_view call, absl::string_view text,
                          absl::string_view last_error);

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_NCCL_ERRORS_H_
