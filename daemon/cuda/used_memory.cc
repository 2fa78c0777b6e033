#include "daemon/cuda/used_memory.h"

#include "daemon/cuda/shared_library.h"

namespace gradsync::daemon {
namespace {

// Declarations from nvml.h, which is not among CUDA's headers.
constexpr int kNvmlSuccess = 0;
struct NvmlMemory {
  unsigned long long total;  // NOLINT(google-runtime-int): NVML's own types
  unsigned long long free;   // NOLINT(google-runtime-int)
  unsigned long long used;   // NOLINT(google-runtime-int)
};
using NvmlInit = int();
using NvmlShutdown = int();
using NvmlDeviceGetHandleByUuid = int(const char* uuid, void** device);
using NvmlDeviceGetMemoryInfo = int(void* device, NvmlMemory* memory);

}  // namespace

std::optional<std::uint64_t> UsedGpuBytes(const std::string& library, const std::string& uuid) {
  const auto nvml = SharedLibrary::Open(library);
  if (!nvml.ok()) return std::nullopt;
  auto* const init = reinterpret_cast<NvmlInit*>(nvml->Find("nvmlInit_v2"));
  auto* const shutdown = reinterpret_cast<NvmlShutdown*>(nvml->Find("nvmlShutdown"));
  auto* const find =
      reinterpret_cast<NvmlDeviceGetHandleByUuid*>(nvml->Find("nvmlDeviceGetHandleByUUID"));
  auto* const ask =
      reinterpret_cast<NvmlDeviceGetMemoryInfo*>(nvml->Find("nvmlDeviceGetMemoryInfo"));
  if (init == nullptr || shutdown == nullptr || find == nullptr || ask == nullptr) {
    return std::nullopt;
  }
  if (init() != kNvmlSuccess) return std::nullopt;
  void* device = nullptr;
  NvmlMemory memory{};
  const bool known =
      find(uuid.c_str(), &device) == kNvmlSuccess && ask(device, &memory) == kNvmlSuccess;
  shutdown();
  if (!known) return std::nullopt;
  return memory.used;
}

}  // namespace gradsync::daemon
