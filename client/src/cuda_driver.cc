#include "client/src/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/error.h"

namespace gradsync::client {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr char kLibraryVariable[] = "GRADSYNC_CUDA_LIBRARY";

absl::Status TooOld(const std::string& library, absl::string_view missing) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverTooOld,
                   absl::StrCat(library, " has no ", missing,
                                ": install NVIDIA's driver for CUDA 13.0 or newer (580 or newer), "
                                "because the daemon needs it (trainers alone need 12.0)"));
}

// For cuInit, which returns CUDA_ERROR_NO_DEVICE, OPERATING_SYSTEM or UNKNOWN when a file of the
// driver is missing or denied.
absl::Status Uninitialized(const absl::Status& why) {
  if (why.code() == absl::StatusCode::kResourceExhausted) return why;
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kGpuUnusable,
                   absl::StrCat(why.message(),
                                ": check that this process may read and write /dev/nvidia0 ..., "
                                "nvidiactl and nvidia-uvm, and that MPS, if it is on, answers; "
                                "gradsyncctl doctor says what is missing"));
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  static const auto* const driver = new absl::StatusOr<const CudaDriver*>(Open());
  return *driver;
}

absl::StatusOr<const CudaDriver*> CudaDriver::Open() {
  const char* const named = std::getenv(kLibraryVariable);
  const std::string path = named == nullptr || *named == '\0' ? kLibrary : named;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverMissing,
                     absl::StrCat("no CUDA driver: ", dlerror(),
                                  "; install NVIDIA's, or give the container its GPUs"));
  }
  const auto find =
      reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  if (find == nullptr) return TooOld(path, "cuGetProcAddress_v2");

  auto driver = std::unique_ptr<CudaDriver>(new CudaDriver);
  std::vector<std::string> missing;
#define GRADSYNC_FIND_CUDA_FUNCTION(name, version)                                                \
  {                                                                                               \
    void* address = nullptr;                                                                      \
    const CUresult result = find(#name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr); \
    if (result != CUDA_SUCCESS || address == nullptr) missing.emplace_back(#name);                \
    driver->name = reinterpret_cast<PFN_##name##_v##version>(address);                            \
  }
  GRADSYNC_CLIENT_CUDA_FUNCTIONS(GRADSYNC_FIND_CUDA_FUNCTION)
#undef GRADSYNC_FIND_CUDA_FUNCTION
  if (!missing.empty()) return TooOld(path, absl::StrJoin(missing, ", "));
  if (const absl::Status status = driver->Check(driver->cuInit(0), "cuInit"); !status.ok()) {
    return Uninitialized(status);
  }
  return driver.release();
}

absl::Status CudaDriver::Check(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "CUDA error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown";
  const auto error = [&](absl::StatusCode code, Reason reason, absl::string_view hint) {
    return MakeError(code, reason, absl::StrCat(call, ": ", name, " (", text, ")", hint));
  };
  switch (result) {
    // cuda.h: "the process must be terminated and relaunched".
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
      return error(absl::StatusCode::kUnavailable, reason::kGpuFault,
                   "; this process cannot use its GPU any more: restart the trainer");
    case CUDA_ERROR_OUT_OF_MEMORY:
      return error(absl::StatusCode::kResourceExhausted, reason::kGpuOutOfMemory,
                   "; free memory on this GPU, or end other processes on it");
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED:
      return error(absl::StatusCode::kResourceExhausted, reason::kMpsFull,
                   "; end other processes on this GPU, or let MPS serve more");
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_OPERATING_SYSTEM:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      // Uninitialized() says more of cuInit.
      return error(
          absl::StatusCode::kFailedPrecondition, reason::kGpuUnusable,
          call == "cuInit" ? "" : "; check CUDA_VISIBLE_DEVICES, and run gradsyncctl doctor");
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
      return error(absl::StatusCode::kFailedPrecondition, reason::kGpuUnusable,
                   "; is nvidia-cuda-mps-control running, with this process's "
                   "CUDA_MPS_PIPE_DIRECTORY?");
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
      return error(absl::StatusCode::kFailedPrecondition, reason::kCapturing,
                   "; capture the passes without gradsync's calls");
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      return error(absl::StatusCode::kInvalidArgument, reason::kBadStream,
                   "; was the stream destroyed, or is it of another device?");
    default:
      return error(absl::StatusCode::kInternal, reason::kCudaError, "");
  }
}

}  // namespace gradsync::client
