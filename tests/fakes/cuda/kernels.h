// The product's kernels on the CPU, found by name: what each does is said in
// daemon/reduce/cuda_kernels.h.

#ifndef TESTS_FAKES_CUDA_KERNELS_H_
#define TESTS_FAKES_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fakes/cuda/operation.h"

namespace gradsync::fakes {

// Kernels access 16 bytes at a time: a buffer that is not so aligned is
// CUDA_ERROR_MISALIGNED_ADDRESS.
inline constexpr std::size_t kVectorBytes = 16;

// Where the CPU finds device memory; every access has been checked.
using Translation = std::function<void*(const void* address)>;

struct Kernel {
  std::size_t argument_bytes;
  // The buffers that a launch with these arguments and so many blocks touches.
  std::vector<Access> (*buffers)(const void* arguments, std::uint32_t blocks);
  void (*run)(const void* arguments, std::uint32_t blocks, const Translation& at);
};

// nullptr if there is none of that name.
const Kernel* FindKernel(const std::string& name);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_KERNELS_H_
