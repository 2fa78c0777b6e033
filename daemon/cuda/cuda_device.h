// A GPU, or one MIG instance of a GPU, as this process sees it. It is named by UUID, never by
// ordinal: ordinals differ between containers and with CUDA_VISIBLE_DEVICES.

#ifndef DAEMON_CUDA_CUDA_DEVICE_H_
#define DAEMON_CUDA_CUDA_DEVICE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cuda.h"
#include "daemon/cuda/cuda_driver.h"

namespace gradsync::daemon {

struct CudaDevice {
  CUdevice handle = 0;
  std::string uuid;  // "GPU-…" or "MIG-…" and 32 hexadecimal digits, as nvidia-smi -L prints it
  std::string name;  // "NVIDIA H200"
  std::uint64_t memory_bytes = 0;
  bool mps = false;  // contexts on it are shared through MPS
};

// The devices that this process sees. Requires cuInit.
absl::StatusOr<std::vector<CudaDevice>> VisibleCudaDevices(const CudaDriver& driver);

// INVALID_ARGUMENT MALFORMED unless `uuid` is written as nvidia-smi -L writes it.
absl::Status CheckCudaDeviceUuid(absl::string_view uuid);

// The device with this UUID. Requires cuInit. INVALID_ARGUMENT as CheckCudaDeviceUuid;
// FAILED_PRECONDITION GPU_NOT_VISIBLE, with a message that says which devices are visible and what
// to do.
absl::StatusOr<CudaDevice> FindCudaDevice(const CudaDriver& driver, absl::string_view uuid);

// The error GPU_NOT_VISIBLE for `uuid`, if `visible` are the UUIDs of the visible devices.
absl::Status CudaDeviceNotVisible(absl::string_view uuid, const std::vector<std::string>& visible);

// Checks that the device admits a context beside those of trainers. FAILED_PRECONDITION:
//   GPU_EXCLUSIVE    compute mode EXCLUSIVE_PROCESS without MPS, or PROHIBITED
//   GPU_UNSUPPORTED  it lacks 64-bit stream memory operations or unified addressing, or is older
//                    than compute capability 8.0
absl::Status CheckCudaDeviceUsable(const CudaDriver& driver, const CudaDevice& device);

// Checks that contexts of both users can be on the device at the same time. Under MPS, one user's
// context waits for the end of the other's, unless MPS was started for several users (`multiuser`).
// FAILED_PRECONDITION MPS_OTHER_USER.
absl::Status CheckMpsUsers(const CudaDevice& device, uid_t worker, uid_t trainer, bool multiuser);

}  // namespace gradsync::daemon

#endif  // DAEMON_CUDA_CUDA_DEVICE_H_
