// 64-bit words in a page that two processes share and register, like a layout's semaphore pages.

#ifndef TESTS_GPU_CUDA_WORDS_H_
#define TESTS_GPU_CUDA_WORDS_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tests/kit/child_process.h"

namespace gradsync::gpu {

// Belongs to the current context. The page stays registered until the process ends.
class CudaWords {
 public:
  CudaWords();                         // makes a page
  explicit CudaWords(int descriptor);  // maps another process's page

  int descriptor() const { return memfd_.get(); }
  std::atomic<std::uint64_t>& word(std::size_t index) const { return words_[index]; }
  CUdeviceptr address(std::size_t index) const { return address_ + index * sizeof(std::uint64_t); }

 private:
  void Register(int descriptor);

  Descriptor memfd_;
  std::atomic<std::uint64_t>* words_ = nullptr;
  CUdeviceptr address_ = 0;
};

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_CUDA_WORDS_H_
