// Includes cuda.h as the driver itself does: with every exported name, also of the deprecated first
// versions, and without the macros that map names to their newest versions. The compiler checks
// every function of the fake against its declaration there, and against the types in
// cudaTypedefs.h.

#ifndef TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_
#define TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>

#endif  // TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_
