// The sum of an all-reduce, computed as a ring does: every chunk begins at another rank, and each
// hop rounds to the data's type. So all ranks get the same result, but not the sum in rank order.

#ifndef TESTS_FAKES_NCCL_NCCL_REDUCTION_H_
#define TESTS_FAKES_NCCL_NCCL_REDUCTION_H_

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace gradsync::fakes {

// Bytes of an element; 0 for types that the fake lacks.
std::size_t NcclTypeBytes(ncclDataType_t type);

// Writes the sum of the contributions to `result`.
void NcclSum(ncclDataType_t type, const std::vector<const void*>& contributions, std::size_t count,
             void* result);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_REDUCTION_H_
