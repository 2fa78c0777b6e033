// 64-bit words in a page that two processes share and have registered, as the semaphore pages of a
// layout are.

#ifndef TESTS_GPU_CUDA_WORDS_H_
#define TESTS_GPU_CUDA_WORDS_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tests/fault/child_process.h"

namespace gradsync::gpu {

// For the context that is current. Stays registered: the process ends.
class CudaWords {
 public:
  CudaWords();                         // a page of its own
  explicit CudaWords(int descriptor);  // another process's

  int descriptor() const { return memfd_.get(); }
  std::atomic<std::uint64_t>& word(std::size_t index) const { return words_[index]; }
  CUdeviceptr address(std::size_t index) const { return address_ + index * sizeof(std::uint64_t); }

 private:
  void Register(int descriptor);

  fault::Descriptor memfd_;
  std::atomic<std::uint64_t>* words_ = nullptr;
  CUdeviceptr address_ = 0;
};

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_CUDA_WORDS_H_
