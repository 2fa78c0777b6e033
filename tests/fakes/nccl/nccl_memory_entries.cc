// ncclMemAlloc: virtual memory with a descriptor, made by the driver's own functions.

#include <nccl.h>

#include <map>
#include <utility>

#include "daemon/base/mutex.h"
#include "tests/fakes/nccl/nccl_call_site.h"

namespace gradsync::fakes {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

// The functions of the driver that ncclMemAlloc uses.
struct DriverFunctions {
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
};

DriverFunctions Find(NcclProcess& process) {
  const auto find = [&](auto** function, const char* name) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(
        process.DriverFunction(name));
  };
  DriverFunctions functions{};
  find(&functions.create, "cuMemCreate");
  find(&functions.release, "cuMemRelease");
  find(&functions.reserve, "cuMemAddressReserve");
  find(&functions.free, "cuMemAddressFree");
  find(&functions.map, "cuMemMap");
  find(&functions.unmap, "cuMemUnmap");
  find(&functions.set_access, "cuMemSetAccess");
  return functions;
}

// The allocations: bytes by address. Thread-safe.
class NcclMemory {
 public:
  static NcclMemory& Get() {
    static auto* const memory = new NcclMemory;
    return *memory;
  }

  ncclResult_t Allocate(void** memory, std::size_t size) {
    NcclProcess& process = *NcclProcess::Get();
    NcclPort* const port = process.port();
    Context* const context = port == nullptr ? nullptr : port->Current();
    if (context == nullptr) return NcclFailure(ncclUnhandledCudaError, "no current context");
    const DriverFunctions driver = Find(process);
    const std::size_t bytes = (size + kGranularity - 1) / kGranularity * kGranularity;
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = port->OrdinalOf(*context);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr address = 0;
    if (driver.create(&handle, bytes, &properties, 0) != CUDA_SUCCESS) {
      return NcclFailure(ncclUnhandledCudaError, "cuMemCreate failed");
    }
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const bool mapped = driver.reserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS &&
                        driver.map(address, bytes, 0, handle, 0) == CUDA_SUCCESS &&
                        driver.set_access(address, bytes, &access, 1) == CUDA_SUCCESS;
    driver.release(handle);
    if (!mapped) return NcclFailure(ncclUnhandledCudaError, "cuMemMap failed");
    *memory = reinterpret_cast<void*>(address);
    daemon::MutexLock lock(&mutex_);
    bytes_[address] = bytes;
    return ncclSuccess;
  }

  ncclResult_t Free(void* memory) {
    const DriverFunctions driver = Find(*NcclProcess::Get());
    const auto address = reinterpret_cast<CUdeviceptr>(memory);
    daemon::MutexLock lock(&mutex_);
    const auto found = bytes_.find(address);
    if (found == bytes_.end()) return NcclFailure(ncclInvalidArgument, "not of ncclMemAlloc");
    if (NcclProcess::Get()->AnyRegistered(address, found->second)) {
      NcclProcess::Get()->folder().Note(kViolation, "ncclMemFree of memory that is registered");
    }
    driver.unmap(address, found->second);
    driver.free(address, found->second);
    bytes_.erase(found);
    return ncclSuccess;
  }

 private:
  daemon::Mutex mutex_;
  std::map<CUdeviceptr, std::size_t> bytes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  static NcclCallSite site("ncclMemAlloc");
  return site.Run([&](const Fault&) { return NcclMemory::Get().Allocate(ptr, size); });
}

ncclResult_t ncclMemFree(void* ptr) {
  static NcclCallSite site("ncclMemFree");
  return site.Run([&](const Fault&) { return NcclMemory::Get().Free(ptr); });
}

}  // extern "C"
