// The product's kernels on the CPU, by name. daemon/reduce/cuda_kernels.h says what each does.

#ifndef TESTS_FAKES_CUDA_KERNELS_H_
#define TESTS_FAKES_CUDA_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fakes/cuda/operation.h"

namespace gradsync::fakes {

// Kernels access 16 bytes at a time. A buffer without this alignment fails with
// CUDA_ERROR_MISALIGNED_ADDRESS.
inline constexpr std::size_t kVectorBytes = 16;

// The CPU's address of device memory, after the access has been checked.
using Translation = std::function<void*(const void* address)>;

struct Kernel {
  std::size_t argument_bytes;
  // The buffers that a launch with these arguments and this number of blocks uses.
  std::vector<Access> (*buffers)(const void* arguments, std::uint32_t blocks);
  void (*run)(const void* arguments, std::uint32_t blocks, const Translation& at);
};

// nullptr if no kernel has that name.
const Kernel* FindKernel(const std::string& name);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_CUDA_KERNELS_H_
