#include "client/src/cuda_context.h"

#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "client/src/device_layout.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"
#include "client/src/utf8.h"

namespace gradsync::client {
namespace {

constexpr absl::string_view kGpuPrefix = "GPU-";
constexpr absl::string_view kMigPrefix = "MIG-";
// Groups of hexadecimal digits, with a dash between them.
constexpr int kGroups[] = {8, 4, 4, 4, 12};

std::string Digits(const CUuuid& uuid) {
  return absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
}

// "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5".
std::string Written(const CUuuid& uuid, bool mig) {
  const std::string digits = Digits(uuid);
  std::vector<absl::string_view> groups;
  absl::string_view rest = digits;
  for (const int length : kGroups) {
    groups.push_back(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  return absl::StrCat(mig ? kMigPrefix : kGpuPrefix, absl::StrJoin(groups, "-"));
}

absl::StatusOr<std::string> UuidOf(const CudaDriver& driver, CUdevice device) {
  CUuuid uuid{};
  char name[256] = {};
  absl::Status status = driver.Check(driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
  if (status.ok()) {
    status =
        driver.Check(driver.cuDeviceGetName(name, sizeof(name) - 1, device), "cuDeviceGetName");
  }
  if (!status.ok()) return status;
  // The UUID of a MIG instance is its own, but only the name shows that it is one.
  return Written(uuid, absl::StrContains(name, " MIG "));
}

// The digits of `uuid`, or nothing if it is malformed.
std::string DigitsOf(absl::string_view uuid) {
  if (!absl::StartsWith(uuid, kGpuPrefix) && !absl::StartsWith(uuid, kMigPrefix)) return "";
  const std::string digits = absl::StrReplaceAll(uuid.substr(kGpuPrefix.size()), {{"-", ""}});
  CUuuid parsed{};
  if (digits.size() != 2 * sizeof(parsed.bytes)) return "";
  absl::HexStringToBytes(digits).copy(parsed.bytes, sizeof(parsed.bytes));
  return absl::EndsWith(Written(parsed, false), uuid.substr(kGpuPrefix.size())) ? digits : "";
}

absl::StatusOr<CUdevice> Find(const CudaDriver& driver, const std::string& uuid) {
  const std::string wanted = DigitsOf(uuid);
  if (wanted.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed,
                     absl::StrCat("'", ValidUtf8(uuid.substr(0, 80)),
                                  "' is not the UUID of a GPU; use one that nvidia-smi -L prints"));
  }
  int count = 0;
  if (auto status = driver.Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
      !status.ok()) {
    return status;
  }
  std::vector<std::string> visible;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    if (auto status = driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
        !status.ok()) {
      return status;
    }
    auto found = UuidOf(driver, device);
    if (!found.ok()) return found.status();
    if (DigitsOf(*found) == wanted) return device;
    visible.push_back(*std::move(found));
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kGpuNotVisible,
                   absl::StrCat("this process does not see ", uuid, "; it sees ",
                                visible.empty() ? "no GPU" : absl::StrJoin(visible, ", "),
                                ". Check CUDA_VISIBLE_DEVICES and the container's devices"));
}

absl::Status CheckStreamOperations(const CudaDriver& driver, CUdevice device,
                                   const std::string& uuid) {
  int supported = 0;
  if (auto status =
          driver.Check(driver.cuDeviceGetAttribute(
                           &supported, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device),
                       "cuDeviceGetAttribute");
      !status.ok()) {
    return status;
  }
  if (supported != 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kGpuUnsupported,
                   absl::StrCat(uuid,
                                " has no 64-bit stream memory operations; keep the gradients in "
                                "host memory"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<CudaContext>> CudaContext::Open(const std::string& uuid) {
  const auto driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const auto device = Find(**driver, uuid);
  if (!device.ok()) return device.status();
  if (auto status = CheckStreamOperations(**driver, *device, uuid); !status.ok()) return status;
  CUcontext context = nullptr;
  if (auto status = (*driver)->Check((*driver)->cuDevicePrimaryCtxRetain(&context, *device),
                                     "cuDevicePrimaryCtxRetain");
      !status.ok()) {
    return status;
  }
  return absl::WrapUnique(new CudaContext(**driver, *device, context));
}

CudaContext::~CudaContext() {
  if (!InForkedChild()) driver_.cuDevicePrimaryCtxRelease(device_);
}

CudaContext::Scope::Scope(const CudaContext& context)
    : driver_(context.driver_),
      status_(driver_.Check(driver_.cuCtxPushCurrent(context.context_), "cuCtxPushCurrent")) {}

CudaContext::Scope::~Scope() {
  CUcontext popped = nullptr;
  if (status_.ok()) driver_.cuCtxPopCurrent(&popped);
}

bool SharesThroughMps(const CudaContext& context) {
  int enabled = 0;
  // Drivers before 12.4 do not know it.
  return context.driver().cuDeviceGetAttribute(&enabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED,
                                               context.device()) == CUDA_SUCCESS &&
         enabled != 0;
}

absl::StatusOr<std::shared_ptr<CudaContext>> OpenDevice(const std::string& uuid) {
  return CudaContext::Open(uuid);
}

}  // namespace gradsync::client

namespace gradsync {

absl::StatusOr<std::string> CudaDeviceUuid(int ordinal) {
  if (client::InForkedChild()) return client::ForkedError();
  const auto driver = client::CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  CUdevice device = 0;
  if (auto status = (*driver)->Check((*driver)->cuDeviceGet(&device, ordinal), "cuDeviceGet");
      !status.ok()) {
    return status;
  }
  return client::UuidOf(**driver, device);
}

}  // namespace gradsync
