#include "tests/fakes/cuda_process.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <new>

namespace gradsync::fakes {
namespace {

// Several of a test's GPUs may be one (GpusThatMayBeOne in control.h).
int OrdinalOf(int gpu) {
  int count = 0;
  CUDA_OK(cuDeviceGetCount(&count));
  return count == 0 ? gpu : gpu % count;
}

}  // namespace

void CheckCuda(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  std::fprintf(stderr, "%s: %s\n", call, name == nullptr ? "an unknown error" : name);
  std::abort();
}

CUcontext EnterContext(int device) {
  CUcontext context = nullptr;
  CUDA_OK(cuInit(0));
  CUDA_OK(cuDevicePrimaryCtxRetain(&context, OrdinalOf(device)));
  CUDA_OK(cuCtxSetCurrent(context));
  return context;
}

CUstream MakeStream(unsigned int flags) {
  CUstream stream = nullptr;
  CUDA_OK(cuStreamCreateWithPriority(&stream, flags, 0));
  return stream;
}

CUevent MakeEvent() {
  CUevent event = nullptr;
  CUDA_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  return event;
}

Word::Word() {
  constexpr std::size_t kPage = 4096;
  void* const page =
      mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  word_ = new (page) std::atomic<std::uint64_t>(0);
  CUDA_OK(cuMemHostRegister(page, kPage, CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&address_, page, 0));
}

CUdeviceptr MakeFloats(std::size_t count) {
  CUdeviceptr address = 0;
  CUDA_OK(cuMemAlloc(&address, count * sizeof(float)));
  return address;
}

void WriteFloats(CUdeviceptr to, const std::vector<float>& values, CUstream stream) {
  CUDA_OK(cuMemcpyHtoDAsync(to, values.data(), values.size() * sizeof(float), stream));
  CUDA_OK(cuStreamSynchronize(stream));
}

std::vector<float> ReadFloats(CUdeviceptr from, std::size_t count, CUstream stream) {
  std::vector<float> values(count);
  CUDA_OK(cuMemcpyDtoHAsync(values.data(), from, count * sizeof(float), stream));
  return values;
}

CUmemAllocationProp ExportableOn(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, OrdinalOf(device)};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

Mapped MakeMapped(std::size_t bytes, int device) {
  const CUmemAllocationProp properties = ExportableOn(device);
  CUmemGenericAllocationHandle handle = 0;
  CUDA_OK(cuMemCreate(&handle, bytes, &properties, 0));
  return MapHandle(handle, bytes, device);
}

Mapped MapHandle(CUmemGenericAllocationHandle handle, std::size_t bytes, int device) {
  Mapped mapped{handle, 0, bytes};
  CUDA_OK(cuMemAddressReserve(&mapped.address, bytes, 0, 0, 0));
  CUDA_OK(cuMemMap(mapped.address, bytes, 0, handle, 0));
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, OrdinalOf(device)};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUDA_OK(cuMemSetAccess(mapped.address, bytes, &access, 1));
  return mapped;
}

void Unmap(const Mapped& mapped) {
  CUDA_OK(cuMemUnmap(mapped.address, mapped.bytes));
  CUDA_OK(cuMemAddressFree(mapped.address, mapped.bytes));
}

}  // namespace gradsync::fakes
