// The setup of CUDA tests: a context, streams, memory, words. If a call fails, the process prints
// the name of the call and aborts, since a test without its setup shows nothing.

#ifndef TESTS_FAKES_CUDA_PROCESS_H_
#define TESTS_FAKES_CUDA_PROCESS_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradsync::fakes {

void CheckCuda(CUresult result, const char* call);
#define CUDA_OK(call) ::gradsync::fakes::CheckCuda(call, #call)

// Initializes CUDA and makes the primary context of `device` current in this thread.
CUcontext EnterContext(int device = 0);

CUstream MakeStream(unsigned int flags = CU_STREAM_NON_BLOCKING);
CUevent MakeEvent();

// A 64-bit word in host memory, for streams to wait for and to write.
class Word {
 public:
  Word();
  CUdeviceptr address() const { return address_; }
  std::uint64_t Load() const { return word_->load(); }
  void Store(std::uint64_t value) { word_->store(value); }

 private:
  std::atomic<std::uint64_t>* word_ = nullptr;  // never freed
  CUdeviceptr address_ = 0;
};

// cuMemAlloc of floats.
CUdeviceptr MakeFloats(std::size_t count);
// Each copy is complete on return. It synchronizes only `stream`.
void WriteFloats(CUdeviceptr to, const std::vector<float>& values, CUstream stream);
std::vector<float> ReadFloats(CUdeviceptr from, std::size_t count, CUstream stream);

// Memory of cuMemCreate that can be exported. It is mapped at a new address, and `device` may read
// and write it.
struct Mapped {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
};
CUmemAllocationProp ExportableOn(int device);
Mapped MakeMapped(std::size_t bytes, int device = 0);
Mapped MapHandle(CUmemGenericAllocationHandle handle, std::size_t bytes, int device = 0);
void Unmap(const Mapped& mapped);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_PROCESS_H_
