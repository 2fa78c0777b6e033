#include "daemon/cuda/cuda_device.h"

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/base/error.h"

namespace gradsync::daemon {
namespace {

constexpr absl::string_view kGpuPrefix = "GPU-";
constexpr absl::string_view kMigPrefix = "MIG-";
constexpr absl::string_view kUuidPattern = "00000000-0000-0000-0000-000000000000";
constexpr std::size_t kMaxNameBytes = 256;

std::string WriteUuid(const CUuuid& uuid, bool mig) {
  const std::string digits =
      absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
  std::string text(mig ? kMigPrefix : kGpuPrefix);
  std::size_t digit = 0;
  for (const char c : kUuidPattern) text += c == '-' ? '-' : digits[digit++];
  return text;
}

absl::StatusOr<int> Attribute(const CudaDriver& driver, CUdevice_attribute attribute,
                              CUdevice device) {
  int value = 0;
  const absl::Status status = driver.cuDeviceGetAttribute(&value, attribute, device);
  if (!status.ok()) return status;
  return value;
}

absl::StatusOr<CudaDevice> Describe(const CudaDriver& driver, int ordinal) {
  CudaDevice device;
  CUuuid uuid{};
  std::size_t bytes = 0;
  char name[kMaxNameBytes] = {};
  absl::Status status = driver.cuDeviceGet(&device.handle, ordinal);
  if (status.ok()) status = driver.cuDeviceGetUuid(&uuid, device.handle);
  if (status.ok()) status = driver.cuDeviceGetName(name, sizeof(name) - 1, device.handle);
  if (status.ok()) status = driver.cuDeviceTotalMem(&bytes, device.handle);
  if (!status.ok()) return status;
  const auto mps = Attribute(driver, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device.handle);
  device.name = name;
  // The driver gives a MIG instance's own UUID; that it is one only the name tells.
  device.uuid = WriteUuid(uuid, absl::StrContains(device.name, " MIG "));
  device.memory_bytes = bytes;
  device.mps = mps.ok() && *mps != 0;  // off, where the driver does not say
  return device;
}

absl::Status Unusable(Reason reason, const CudaDevice& device, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason,
                   absl::StrCat(device.uuid, " (", device.name, ") ", what),
                   {{field::kDevice, device.uuid}});
}

}  // namespace

absl::StatusOr<std::vector<CudaDevice>> VisibleCudaDevices(const CudaDriver& driver) {
  int count = 0;
  if (const absl::Status status = driver.cuDeviceGetCount(&count); !status.ok()) return status;
  std::vector<CudaDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    auto device = Describe(driver, ordinal);
    if (!device.ok()) return device.status();
    devices.push_back(*std::move(device));
  }
  return devices;
}

absl::Status CheckCudaDeviceUuid(absl::string_view uuid) {
  const auto invalid = [&] {
    return MakeError(
        absl::StatusCode::kInvalidArgument, reason::kMalformed,
        absl::StrCat("'", absl::CHexEscape(uuid.substr(0, 64)),
                     "' is no GPU: expected GPU-UUID or MIG-UUID, as nvidia-smi -L prints it"));
  };
  if (!absl::StartsWith(uuid, kGpuPrefix) && !absl::StartsWith(uuid, kMigPrefix)) return invalid();
  uuid.remove_prefix(kGpuPrefix.size());
  if (uuid.size() != kUuidPattern.size()) return invalid();
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    const char c = uuid[i];
    const bool right =
        kUuidPattern[i] == '-' ? c == '-' : absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
    if (!right) return invalid();
  }
  return absl::OkStatus();
}

absl::Status CudaDeviceNotVisible(absl::string_view uuid, const std::vector<std::string>& visible) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason::kGpuNotVisible,
      absl::StrCat(
          "the daemon's worker does not see ", uuid, "; it sees ",
          visible.empty() ? "no GPU" : absl::StrJoin(visible, ", "),
          ". Give gradsyncd the trainers' GPUs: DeviceAllow= for /dev/nvidia* in its unit, "
          "NVIDIA_VISIBLE_DEVICES or a shared resource claim for its container, and no "
          "CUDA_VISIBLE_DEVICES that hides it"),
      {{field::kDevice, uuid}});
}

absl::StatusOr<CudaDevice> FindCudaDevice(const CudaDriver& driver, absl::string_view uuid) {
  if (const absl::Status status = CheckCudaDeviceUuid(uuid); !status.ok()) return status;
  const auto devices = VisibleCudaDevices(driver);
  if (!devices.ok()) return devices.status();
  std::vector<std::string> visible;
  for (const CudaDevice& device : *devices) {
    // Whatever its prefix: whether a device is a MIG instance is read from its name.
    if (absl::EndsWith(device.uuid, uuid.substr(kGpuPrefix.size()))) return device;
    visible.push_back(device.uuid);
  }
  return CudaDeviceNotVisible(uuid, visible);
}

absl::Status CheckCudaDeviceUsable(const CudaDriver& driver, const CudaDevice& device) {
  const auto mode = Attribute(driver, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device.handle);
  if (!mode.ok()) return mode.status();
  if (*mode == CU_COMPUTEMODE_PROHIBITED) {
    return Unusable(reason::kGpuExclusive, device,
                    "is in compute mode PROHIBITED: run 'nvidia-smi -c DEFAULT' for it");
  }
  if (*mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS && !device.mps) {
    return Unusable(reason::kGpuExclusive, device,
                    "is in compute mode EXCLUSIVE_PROCESS, in which only one process may use it: "
                    "start MPS (nvidia-cuda-mps-control -d) before the daemon and the trainers, or "
                    "run 'nvidia-smi -c DEFAULT' for it");
  }
  struct Needed {
    CUdevice_attribute attribute;
    int least;
    absl::string_view without;
  };
  static constexpr Needed kNeeded[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8,
       "is older than compute capability 8.0, for which gradsync has kernels"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1,
       "has no 64-bit stream memory operations"},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1, "has no unified addressing"},
  };
  for (const Needed& needed : kNeeded) {
    const auto value = Attribute(driver, needed.attribute, device.handle);
    if (!value.ok()) return value.status();
    if (*value < needed.least) return Unusable(reason::kGpuUnsupported, device, needed.without);
  }
  return absl::OkStatus();
}

absl::Status CheckMpsUsers(const CudaDevice& device, uid_t worker, uid_t trainer, bool multiuser) {
  if (!device.mps || multiuser || worker == trainer) return absl::OkStatus();
  return Unusable(
      reason::kMpsOtherUser, device,
      absl::StrCat(
          "is shared through MPS, which serves one user at a time; gradsyncd runs as user ", worker,
          " and the trainer as user ", trainer,
          ", so that one would wait for the other's end: start MPS for several users "
          "(nvidia-cuda-mps-control -d -multiuser-server) and set mps_multiuser, run "
          "gradsyncd as the trainer's user, or stop MPS"));
}

}  // namespace gradsync::daemon
