// Virtual memory management: allocations with handles, reserved addresses, and mappings. Processes
// pass allocations to each other as file descriptors.

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <memory>

#include "tests/fakes/cuda/call_site.h"

namespace gradsync::fakes {
namespace {

// The object behind a CUmemGenericAllocationHandle.
struct MemoryHandle {
  std::shared_ptr<Allocation> allocation;
  bool exportable = false;
};

HandleTable<CUmemGenericAllocationHandle, MemoryHandle>& Handles() {
  static auto* const handles = new HandleTable<CUmemGenericAllocationHandle, MemoryHandle>;
  return *handles;
}

// The number in the machine of a device of this process. nullptr if there is no such device.
const std::uint32_t* GpuAt(const CUmemLocation& location) {
  auto& contexts = Driver::Get()->contexts;
  if (location.type != CU_MEM_LOCATION_TYPE_DEVICE || location.id < 0 ||
      static_cast<std::size_t>(location.id) >= contexts.size()) {
    return nullptr;
  }
  return &contexts[static_cast<std::size_t>(location.id)].gpu;
}

CUresult Create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp& properties) {
  Driver& driver = *Driver::Get();
  const std::uint32_t* const gpu = GpuAt(properties.location);
  const unsigned int types = properties.requestedHandleTypes;
  if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes == 0 || bytes % kGranularity != 0 || properties.type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  constexpr unsigned int kPosix = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  // Fabric handles need a fabric, which this machine does not have.
  if ((types & ~kPosix) != 0 || (types != 0 && !driver.machine().gpus[*gpu].posix_handles)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  auto allocation = Allocation::Create(driver.folder, *gpu, MemoryKind::kVirtual, bytes);
  if (allocation == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = Handles().Add(
      std::make_shared<MemoryHandle>(MemoryHandle{std::move(allocation), types == kPosix}));
  return CUDA_SUCCESS;
}

CUresult Export(int* descriptor, CUmemGenericAllocationHandle handle) {
  const std::shared_ptr<MemoryHandle> memory = Handles().Find(handle);
  if (memory == nullptr || !memory->exportable) return CUDA_ERROR_INVALID_VALUE;
  *descriptor = fcntl(memory->allocation->fd(), F_DUPFD_CLOEXEC, 0);
  return *descriptor < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

// The caller keeps the descriptor.
CUresult Import(CUmemGenericAllocationHandle* handle, int descriptor) {
  Driver& driver = *Driver::Get();
  daemon::UniqueFd own(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  auto allocation = own.valid() ? Allocation::Adopt(driver.folder, std::move(own)) : nullptr;
  if (allocation == nullptr || allocation->header().kind != MemoryKind::kVirtual) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (const Context& context : driver.contexts) {
    if (context.gpu != allocation->header().gpu) continue;
    *handle =
        Handles().Add(std::make_shared<MemoryHandle>(MemoryHandle{std::move(allocation), true}));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;  // the memory is on a GPU that this process does not see
}

AccessRight RightOf(CUmemAccess_flags flags) {
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return AccessRight::kReadWrite;
  return flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? AccessRight::kRead : AccessRight::kNone;
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp*,
                                               CUmemAllocationGranularity_flags) {
  static CallSite site("cuMemGetAllocationGranularity");
  return site.Run(Needs::kInit, [&] {
    *granularity = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                             const CUmemAllocationProp* properties, unsigned long long flags) {
  static CallSite site("cuMemCreate");
  return site.Run(Needs::kInit, [&] {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : Create(handle, bytes, *properties);
  });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  static CallSite site("cuMemRelease");
  return site.Run(Needs::kInit, [&] {
    return Handles().Remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags) {
  static CallSite site("cuMemExportToShareableHandle");
  return site.Run(Needs::kInit, [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return Export(static_cast<int*>(shareable), handle);
  });
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                                void* shareable, CUmemAllocationHandleType type) {
  static CallSite site("cuMemImportFromShareableHandle");
  return site.Run(Needs::kInit, [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    return Import(handle, static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)));
  });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                                     CUdeviceptr, unsigned long long flags) {
  static CallSite site("cuMemAddressReserve");
  return site.Run(Needs::kInit, [&] {
    // The fake has no larger alignments.
    if (bytes == 0 || bytes % kGranularity != 0 || alignment > kGranularity ||
        (alignment & (alignment - 1)) != 0 || flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return Driver::Get()->addresses.Reserve(bytes, address);
  });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  static CallSite site("cuMemAddressFree");
  return site.Run(Needs::kInit, [&] { return Driver::Get()->addresses.Release(address, bytes); });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  static CallSite site("cuMemMap");
  return site.Run(Needs::kInit, [&] {
    const std::shared_ptr<MemoryHandle> memory = Handles().Find(handle);
    if (memory == nullptr || offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return Driver::Get()->addresses.Map(address, bytes, memory->allocation);
  });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  static CallSite site("cuMemUnmap");
  return site.Run(Needs::kInit, [&] {
    Driver& driver = *Driver::Get();
    for (const Context& context : driver.contexts) {
      driver.scheduler.NoteUse(context.timeline, address, bytes, "cuMemUnmap");
    }
    return driver.addresses.Unmap(address, bytes);
  });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t bytes,
                                const CUmemAccessDesc* descriptions, std::size_t count) {
  static CallSite site("cuMemSetAccess");
  return site.Run(Needs::kInit, [&] {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t* const gpu = GpuAt(descriptions[i].location);
      if (gpu == nullptr) return CUDA_ERROR_INVALID_DEVICE;
      const CUresult result =
          Driver::Get()->addresses.SetAccess(address, bytes, *gpu, RightOf(descriptions[i].flags));
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
