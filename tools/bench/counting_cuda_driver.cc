// libcounting_cuda_driver.so: returns the functions of the CUDA driver that
// GRADSYNC_COUNTED_CUDA_LIBRARY names, by cuGetProcAddress_v2 as the driver itself does. It counts
// calls of those that make the host wait for the GPU.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// By plain name and version, as the client asks for them. Besides what waits by its name: copies
// without a stream, and what frees or unmaps memory.
#define GRADSYNC_WAITING_CUDA_FUNCTIONS(FUNCTION) \
  FUNCTION(cuCtxSynchronize, 2000)                \
  FUNCTION(cuStreamSynchronize, 2000)             \
  FUNCTION(cuEventSynchronize, 2000)              \
  FUNCTION(cuMemcpy, 4000)                        \
  FUNCTION(cuMemcpyHtoD, 3020)                    \
  FUNCTION(cuMemcpyDtoH, 3020)                    \
  FUNCTION(cuMemcpyDtoD, 3020)                    \
  FUNCTION(cuMemsetD8, 3020)                      \
  FUNCTION(cuMemsetD32, 3020)                     \
  FUNCTION(cuMemFree, 3020)                       \
  FUNCTION(cuMemFreeHost, 2000)                   \
  FUNCTION(cuMemHostUnregister, 4000)             \
  FUNCTION(cuMemUnmap, 10020)                     \
  FUNCTION(cuIpcCloseMemHandle, 4010)

namespace {

std::atomic<std::uint64_t> synchronizations{0};

// One function of the driver with the count before it. `Name` tells functions of one type apart.
template <typename Name, typename Function>
struct Counted;

template <typename Name, typename... Arguments>
struct Counted<Name, CUresult (*)(Arguments...)> {
  static inline std::atomic<CUresult (*)(Arguments...)> function{nullptr};
  static CUresult Call(Arguments... arguments) {
    synchronizations.fetch_add(1, std::memory_order_relaxed);
    return function.load()(arguments...);
  }
};

PFN_cuGetProcAddress_v12000 RealGetProcAddress() {
  static const auto real = [] {
    const char* const path = std::getenv("GRADSYNC_COUNTED_CUDA_LIBRARY");
    void* const library = dlopen(path == nullptr ? "libcuda.so.1" : path, RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr
                              : reinterpret_cast<PFN_cuGetProcAddress_v12000>(
                                    dlsym(library, "cuGetProcAddress_v2"));
  }();
  return real;
}

// Puts the counting form in the place of `*function`, if that waits.
void Count(const char* name, int version, void** function) {
#define GRADSYNC_COUNT_CUDA_FUNCTION(waiting, since)                             \
  if (std::strcmp(name, #waiting) == 0 && version == (since)) {                  \
    struct Name;                                                                 \
    using This = Counted<Name, PFN_##waiting##_v##since>;                        \
    This::function.store(reinterpret_cast<PFN_##waiting##_v##since>(*function)); \
    *function = reinterpret_cast<void*>(&This::Call);                            \
  }
  GRADSYNC_WAITING_CUDA_FUNCTIONS(GRADSYNC_COUNT_CUDA_FUNCTION)
#undef GRADSYNC_COUNT_CUDA_FUNCTION
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuGetProcAddress_v2(const char* symbol, void** pfn, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult* status) {
  const PFN_cuGetProcAddress_v12000 real = RealGetProcAddress();
  if (real == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  const CUresult result = real(symbol, pfn, version, flags, status);
  if (result == CUDA_SUCCESS && *pfn != nullptr) Count(symbol, version, pfn);
  return result;
}

std::uint64_t gradsync_cuda_synchronizations() { return synchronizations.load(); }

}  // extern "C"
