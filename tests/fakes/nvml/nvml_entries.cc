// The part of NVML that the product uses: how much of a GPU's memory is in use.

#include <cstdint>
#include <cstring>

#include "tests/fakes/machine/device_memory.h"
#include "tests/fakes/machine/state_folder.h"

namespace gradsync::fakes {
namespace {

constexpr int kSuccess = 0;
constexpr int kUninitialized = 1;
constexpr int kNotFound = 6;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

// The handle of a device is its number in the machine plus 1.
void* HandleOf(std::uintptr_t gpu) { return reinterpret_cast<void*>(gpu + 1); }

}  // namespace
}  // namespace gradsync::fakes

extern "C" {

using gradsync::fakes::StateFolder;

int nvmlInit_v2() {
  return StateFolder::OfThisProcess() == nullptr ? gradsync::fakes::kUninitialized
                                                 : gradsync::fakes::kSuccess;
}

int nvmlShutdown() { return gradsync::fakes::kSuccess; }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const auto& gpus = StateFolder::OfThisProcess()->machine().gpus;
  for (std::uintptr_t gpu = 0; gpu < gpus.size(); ++gpu) {
    if (gpus[gpu].uuid != uuid) continue;
    *device = gradsync::fakes::HandleOf(gpu);
    return gradsync::fakes::kSuccess;
  }
  return gradsync::fakes::kNotFound;
}

int nvmlDeviceGetMemoryInfo(void* device, gradsync::fakes::Memory* memory) {
  const StateFolder& folder = *StateFolder::OfThisProcess();
  const auto gpu = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(device) - 1);
  memory->total = folder.machine().gpus[gpu].memory_bytes;
  memory->used = gradsync::fakes::UsedBytes(folder, gpu);
  memory->free = memory->total - memory->used;
  return gradsync::fakes::kSuccess;
}

}  // extern "C"
