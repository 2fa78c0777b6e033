// Initialization and devices.

#include <cstdio>
#include <cstring>
#include <string>

#include <unistd.h>

#include "tests/fakes/cuda/call_site.h"

namespace gradsync::fakes {
namespace {

// The GPU of a CUdevice; nullptr if there is none.
const GpuDescription* GpuOf(CUdevice device) {
  Driver& driver = *Driver::Get();
  if (device < 0 || static_cast<std::size_t>(device) >= driver.contexts.size()) return nullptr;
  return &driver.machine().gpus[driver.contexts[static_cast<std::size_t>(device)].gpu];
}

int AttributeOf(const GpuDescription& gpu, CUdevice_attribute attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return gpu.compute_capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return gpu.compute_capability % 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      return static_cast<int>(gpu.mode);
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
      return Driver::Get()->machine().mps ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return gpu.posix_handles ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
      return gpu.stream_memory_operations ? 1 : 0;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    default:
      return 0;  // the machine has no such feature
  }
}

}  // namespace
}  // namespace gradsync::fakes

using gradsync::fakes::CallSite;
using gradsync::fakes::Driver;
using gradsync::fakes::Needs;

extern "C" {

CUresult CUDAAPI cuInit(unsigned int flags) {
  static CallSite site("cuInit");
  return site.Run(Needs::kNothing, [&] {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    Driver& driver = *Driver::Get();
    const int inherited = driver.initialized_in.load();
    if (inherited != 0 && inherited != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    gradsync::daemon::MutexLock lock(&driver.contexts_mutex);
    if (driver.initialized_in.load() != 0) return CUDA_SUCCESS;
    for (const std::uint32_t gpu : gradsync::fakes::VisibleGpus(driver.machine())) {
      const int ordinal = static_cast<int>(driver.contexts.size());
      driver.contexts.emplace_back();
      driver.contexts.back().ordinal = ordinal;
      driver.contexts.back().gpu = gpu;
    }
    if (driver.contexts.empty()) return CUDA_ERROR_NO_DEVICE;
    driver.initialized_in.store(getpid());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  static CallSite site("cuDriverGetVersion");
  return site.Run(Needs::kNothing, [&] {
    *version = Driver::Get()->machine().driver_version;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  static CallSite site("cuDeviceGetCount");
  return site.Run(Needs::kInit, [&] {
    *count = static_cast<int>(Driver::Get()->contexts.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  static CallSite site("cuDeviceGet");
  return site.Run(Needs::kInit, [&] {
    *device = ordinal;
    return gradsync::fakes::GpuOf(ordinal) == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  static CallSite site("cuDeviceGetUuid_v2");
  return site.Run(Needs::kInit, [&] {
    const auto* const gpu = gradsync::fakes::GpuOf(device);
    if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    std::size_t at = 4;  // after "GPU-" or "MIG-"
    for (char& byte : uuid->bytes) {
      while (at < gpu->uuid.size() && gpu->uuid[at] == '-') ++at;
      byte = static_cast<char>(std::stoi(gpu->uuid.substr(at, 2), nullptr, 16));
      at += 2;
    }
    return CUDA_SUCCESS;
  });
}

// The first version of the function does not support MIG. Nothing should call it any more.
CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

CUresult CUDAAPI cuDeviceGetName(char* name, int bytes, CUdevice device) {
  static CallSite site("cuDeviceGetName");
  return site.Run(Needs::kInit, [&] {
    if (gradsync::fakes::GpuOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(name, static_cast<std::size_t>(bytes), "Fake GPU");
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  static CallSite site("cuDeviceGetAttribute");
  return site.Run(Needs::kInit, [&] {
    const auto* const gpu = gradsync::fakes::GpuOf(device);
    if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = gradsync::fakes::AttributeOf(*gpu, attribute);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  static CallSite site("cuDeviceTotalMem_v2");
  return site.Run(Needs::kInit, [&] {
    const auto* const gpu = gradsync::fakes::GpuOf(device);
    if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = gpu->memory_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  static CallSite site("cuMemGetInfo_v2");
  return site.Run(Needs::kContext, [&] {
    Driver& driver = *Driver::Get();
    const std::uint32_t gpu = gradsync::fakes::CurrentContext()->gpu;
    *total = driver.machine().gpus[gpu].memory_bytes;
    *free = *total - gradsync::fakes::UsedBytes(driver.folder, gpu);
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
