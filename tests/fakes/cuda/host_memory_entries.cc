// Page-locked host memory.

#include <sys/mman.h>

#include <map>

#include "tests/fakes/cuda/call_site.h"

namespace gradsync::fakes {
namespace {

// The allocations of cuMemHostAlloc: bytes by address. Thread-safe.
class LockedPages {
 public:
  static LockedPages& Get() {
    static auto* const pages = new LockedPages;
    return *pages;
  }

  CUresult Allocate(void** host, std::size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *host = memory;
    {
      daemon::MutexLock lock(&mutex_);
      bytes_[memory] = bytes;
    }
    return Driver::Get()->addresses.RegisterHost(memory, bytes, true);
  }

  CUresult Free(void* host) {
    daemon::MutexLock lock(&mutex_);
    const auto found = bytes_.find(host);
    if (found == bytes_.end()) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = Driver::Get()->addresses.UnregisterHost(host);
    munmap(host, found->second);
    bytes_.erase(found);
    return result;
  }

 private:
  daemon::Mutex mutex_;
  std::map<void*, std::size_t> bytes_ ABSL_GUARDED_BY(mutex_);
};

void AwaitUnparked(const char* call) {
  Driver::Get()->scheduler.AwaitNothing(Operation::Kind::kWordWait, CurrentContext()->timeline,
                                        call);
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuMemHostAlloc(void** host, std::size_t bytes, unsigned int) {
  static CallSite site("cuMemHostAlloc");
  return site.Run(Needs::kContext, [&] { return LockedPages::Get().Allocate(host, bytes); });
}

CUresult CUDAAPI cuMemFreeHost(void* host) {
  static CallSite site("cuMemFreeHost");
  return site.Run(Needs::kContext, [&] {
    AwaitUnparked("cuMemFreeHost");
    Driver::Get()->scheduler.AwaitIdle(CurrentContext()->timeline);
    return LockedPages::Get().Free(host);
  });
}

CUresult CUDAAPI cuMemHostRegister_v2(void* host, std::size_t bytes, unsigned int) {
  static CallSite site("cuMemHostRegister_v2");
  return site.Run(Needs::kContext,
                  [&] { return Driver::Get()->addresses.RegisterHost(host, bytes, false); });
}

CUresult CUDAAPI cuMemHostUnregister(void* host) {
  static CallSite site("cuMemHostUnregister");
  return site.Run(Needs::kContext, [&] {
    AwaitUnparked("cuMemHostUnregister");
    return Driver::Get()->addresses.UnregisterHost(host);
  });
}

CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* host,
                                              unsigned int flags) {
  static CallSite site("cuMemHostGetDevicePointer_v2");
  return site.Run(Needs::kContext, [&] {
    const auto found = Driver::Get()->addresses.DeviceAddressOf(host);
    if (!found.has_value() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *address = *found;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
