// cuda.h as the driver itself sees it: every exported name, the deprecated first versions too, and
// no macros that map names to their newest versions. Every function of the fake is checked against
// its declaration there, and against the types in cudaTypedefs.h.

#ifndef TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_
#define TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>

#endif  // TESTS_FAKES_CUDA_CUDA_DECLARATIONS_H_
