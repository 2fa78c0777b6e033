// The arithmetic of an all-reduce, as a ring does it: every chunk begins at another rank, and each
// hop rounds to the data's type. So the result is the same on all ranks, but not the sum in the
// order of ranks.

#ifndef TESTS_FAKES_NCCL_NCCL_REDUCTION_H_
#define TESTS_FAKES_NCCL_NCCL_REDUCTION_H_

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace gradsync::fakes {

// Bytes of an element; 0 for types that the fake does not have.
std::size_t NcclTypeBytes(ncclDataType_t type);

// False for operations that the fake does not have.
bool HasNcclOperation(ncclRedOp_t operation);

// `result` = the contributions, reduced.
void NcclReduce(ncclDataType_t type, ncclRedOp_t operation,
                const std::vector<const void*>& contributions, std::size_t count, void* result);

}  // namespace gradsync::fakes

#endif  // TESTS_FAKES_NCCL_NCCL_REDUCTION_H_
