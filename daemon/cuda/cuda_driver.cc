#include "daemon/cuda/cuda_driver.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"
#include "daemon/cuda/cuda_errors.h"
#include "daemon/cuda/least_driver.h"
#include "daemon/cuda/shared_library.h"

namespace gradsync::daemon {
namespace {

absl::Status TooOld(const SharedLibrary& library, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverTooOld,
                   absl::StrCat(library.path(), " ", what, ": ", kCudaDriverRemedy));
}

}  // namespace

absl::StatusOr<std::unique_ptr<const CudaDriver>> CudaDriver::Open(const std::string& path) {
  const auto library = SharedLibrary::Open(path);
  if (!library.ok()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kCudaDriverMissing,
                     absl::StrCat("no CUDA driver: ", library.status().message()));
  }
  const auto find =
      reinterpret_cast<decltype(&::cuGetProcAddress)>(library->Find("cuGetProcAddress_v2"));
  if (find == nullptr) return TooOld(*library, "has no cuGetProcAddress_v2");

  auto driver = std::unique_ptr<CudaDriver>(new CudaDriver);
  std::vector<std::string> missing;
#define GRADSYNC_FIND_CUDA_FUNCTION(name, version)                                                \
  {                                                                                               \
    void* address = nullptr;                                                                      \
    const CUresult result = find(#name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr); \
    if (result != CUDA_SUCCESS || address == nullptr) missing.emplace_back(#name);                \
    driver->name.function_ = reinterpret_cast<PFN_##name##_v##version>(address);                  \
  }
  GRADSYNC_CUDA_FUNCTIONS(GRADSYNC_FIND_CUDA_FUNCTION)
#undef GRADSYNC_FIND_CUDA_FUNCTION
  int version = 0;
  if (driver->cuDriverGetVersion.function_ != nullptr) {
    if (const absl::Status status = driver->cuDriverGetVersion(&version); !status.ok()) {
      return status;
    }
  }
  if (version < kLeastCudaDriver) {
    return TooOld(*library,
                  absl::StrCat("is a driver for CUDA ", version / 1000, ".", version % 1000 / 10));
  }
  if (!missing.empty()) {
    return TooOld(*library, absl::StrCat("has no ", absl::StrJoin(missing, ", ")));
  }
  return driver;
}

absl::Status CudaDriver::StatusOf(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName.Result(result, &name) != CUDA_SUCCESS || name == nullptr) name = "CUDA error";
  if (cuGetErrorString.Result(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown";
  return StatusOfCuda(result, call, name, text);
}

absl::Status CudaDriver::StatusOfInit(CUresult result) const {
  const absl::Status status = StatusOf(result, "cuInit");
  if (status.ok() || status.code() == absl::StatusCode::kResourceExhausted) return status;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kGpuUnusable,
      absl::StrCat(status.message(),
                   ": check that gradsyncd may read and write /dev/nvidia0 ..., nvidiactl and "
                   "nvidia-uvm (DeviceAllow= in its unit, NVIDIA_VISIBLE_DEVICES for its "
                   "container), that they are there (nvidia-modprobe -u -c=0) and that MPS, if it "
                   "is on, answers; gradsyncctl doctor says what is missing"),
      {{field::kError, DetailsOf(status).Value(field::kError)}});
}

}  // namespace gradsync::daemon
