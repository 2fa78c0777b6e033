#include "daemon/cuda/nccl_errors.h"

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {

absl::Status StatusOfNccl(ncclResult_t result, absl::string_view call, absl::string_view text,
                          absl::string_view last_error) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  std::string message = absl::StrCat(call, ": ", text);
  last_error = absl::StripAsciiWhitespace(last_error);
  if (!last_error.empty()) absl::StrAppend(&message, " (", last_error, ")");
  switch (result) {
    case ncclRemoteError:
    case ncclSystemError:
      return MakeError(absl::StatusCode::kUnavailable, reason::kNcclRemoteLost, message);
    case ncclUnhandledCudaError:
      return MakeError(absl::StatusCode::kUnavailable, reason::kNcclCudaError, message);
    default:
      return MakeError(absl::StatusCode::kInternal, reason::kNcclError, message);
  }
}

}  // namespace gradsync::daemon
