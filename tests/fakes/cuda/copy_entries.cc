// Copies and fills.

#include <cstring>
#include <memory>
#include <vector>

#include "tests/fakes/cuda/call_site.h"
#include "tests/fakes/cuda/enqueue.h"

namespace gradsync::fakes {
namespace {

// True for host memory that is not page-locked. The driver copies it through a buffer of its own.
bool Pageable(CUdeviceptr address, std::size_t bytes) {
  const AddressSpace& addresses = Driver::Get()->addresses;
  return !addresses.Contains(address) &&
         !addresses.IsRegisteredHost(reinterpret_cast<const void*>(address), bytes);
}

// The CPU's address of a copy's source or target; nullptr if the access is illegal.
void* Side(const AccessLock& lock, std::uint32_t gpu, CUdeviceptr address, std::size_t bytes,
           bool write) {
  if (!Driver::Get()->addresses.Contains(address)) return reinterpret_cast<void*>(address);
  return lock.Translate(gpu, address, bytes, write);
}

CUresult Copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream,
              const char* name) {
  if (bytes == 0) return CUDA_SUCCESS;
  const bool to_pageable = Pageable(to, bytes);
  // Pageable memory: the copy has the content at the time of the call.
  std::shared_ptr<std::vector<char>> staged;
  if (Pageable(from, bytes)) {
    const char* const start = reinterpret_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(start, start + bytes);
  }
  std::shared_ptr<Operation> copy;
  const CUresult result = Enqueue(
      stream,
      [&](Context* context, Operation* operation) {
        operation->name = name;
        operation->accesses = {{to, bytes, true}, {from, bytes, false}};
        operation->work = [=, gpu = context->gpu] {
          const AccessLock lock(Driver::Get()->addresses);
          const void* const source =
              staged != nullptr ? staged->data() : Side(lock, gpu, from, bytes, false);
          void* const target = Side(lock, gpu, to, bytes, true);
          if (source == nullptr || target == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
          std::memmove(target, source, bytes);
          return CUDA_SUCCESS;
        };
        return CUDA_SUCCESS;
      },
      &copy);
  // Pageable memory: the call returns when the copy is done.
  if (result == CUDA_SUCCESS && to_pageable) Driver::Get()->scheduler.AwaitDone(copy);
  return result;
}

template <typename Value>
CUresult Fill(CUdeviceptr to, Value value, std::size_t count, CUstream stream, const char* name) {
  if (to % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t bytes = count * sizeof(Value);
  return Enqueue(stream, [&](Context* context, Operation* operation) {
    operation->name = name;
    operation->accesses = {{to, bytes, true}};
    operation->work = [=, gpu = context->gpu] {
      const AccessLock lock(Driver::Get()->addresses);
      auto* const values = static_cast<Value*>(lock.Translate(gpu, to, bytes, true));
      if (values == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
      for (std::size_t i = 0; i < count; ++i) values[i] = value;
      return CUDA_SUCCESS;
    };
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace gradsync::fakes

using namespace gradsync::fakes;  // NOLINT(google-build-using-namespace): a C API's bodies

extern "C" {

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                               CUstream stream) {
  static CallSite site("cuMemcpyAsync");
  return site.Run(Needs::kContext, [&] { return Copy(to, from, bytes, stream, "cuMemcpyAsync"); });
}

CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes,
                                      CUstream stream) {
  static CallSite site("cuMemcpyHtoDAsync_v2");
  return site.Run(Needs::kContext, [&] {
    return Copy(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream, "cuMemcpyHtoDAsync");
  });
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes,
                                      CUstream stream) {
  static CallSite site("cuMemcpyDtoHAsync_v2");
  return site.Run(Needs::kContext, [&] {
    return Copy(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream, "cuMemcpyDtoHAsync");
  });
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count,
                                 CUstream stream) {
  static CallSite site("cuMemsetD8Async");
  return site.Run(Needs::kContextToEnqueue,
                  [&] { return Fill(to, value, count, stream, "cuMemsetD8Async"); });
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, std::size_t count,
                                  CUstream stream) {
  static CallSite site("cuMemsetD32Async");
  return site.Run(Needs::kContextToEnqueue,
                  [&] { return Fill(to, value, count, stream, "cuMemsetD32Async"); });
}

}  // extern "C"
