// The one place where NCCL's errors become statuses.

#ifndef DAEMON_CUDA_NCCL_ERRORS_H_
#define DAEMON_CUDA_NCCL_ERRORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nccl.h"

namespace gradsync {

// OK for ncclSuccess and ncclInProgress, else with `call` and NCCL's `text` and `last_error` in it:
//   UNAVAILABLE  NCCL_PEER_LOST: a remote rank, or the network to it, is gone
//                NCCL_CUDA_ERROR: a CUDA call inside NCCL failed
//   INTERNAL     NCCL_ERROR: a fault of NCCL or of this program
absl::Status StatusOfNccl(ncclResult_t result, absl::string_view call, absl::string_view text,
                          absl::string_view last_error);

}  // namespace gradsync

#endif  // DAEMON_CUDA_NCCL_ERRORS_H_
