#include "tests/gpu/cuda_words.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tests/fakes/cuda_process.h"

namespace gradsync::gpu {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

CudaWords::CudaWords() : memfd_(memfd_create("words", MFD_CLOEXEC)) {
  if (ftruncate(memfd_.get(), kPage) != 0) std::perror("ftruncate");
  Register(memfd_.get());
}

CudaWords::CudaWords(int descriptor) { Register(descriptor); }

void CudaWords::Register(int descriptor) {
  void* const page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (page == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  words_ = static_cast<std::atomic<std::uint64_t>*>(page);
  CUDA_OK(
      cuMemHostRegister(page, kPage, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
  CUDA_OK(cuMemHostGetDevicePointer(&address_, page, 0));
}

}  // namespace gradsync::gpu
