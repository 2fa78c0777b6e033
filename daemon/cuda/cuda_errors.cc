#include "daemon/cuda/cuda_errors.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "daemon/cuda/least_driver.h"

namespace gradsync::daemon {

bool EndsProcess(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

absl::Status StatusOfCuda(CUresult result, absl::string_view call, absl::string_view name,
                          absl::string_view text) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(call, ": ", name, " (", text, ")");
  const auto error = [&](absl::StatusCode code, Reason reason) {
    return MakeError(code, reason, message, {{field::kError, name}});
  };
  if (EndsProcess(result)) return error(absl::StatusCode::kUnavailable, reason::kGpuFault);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return error(absl::StatusCode::kResourceExhausted, reason::kGpuOutOfMemory);
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED:
      return error(absl::StatusCode::kResourceExhausted, reason::kMpsFull);
    // The kernels need a newer driver.
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
      return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverTooOld,
                       absl::StrCat(message, ": ", kCudaDriverRemedy), {{field::kError, name}});
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_OPERATING_SYSTEM:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
      return error(absl::StatusCode::kFailedPrecondition, reason::kGpuUnusable);
    default:
      return error(absl::StatusCode::kInternal, reason::kCudaError);
  }
}

}  // namespace gradsync::daemon
