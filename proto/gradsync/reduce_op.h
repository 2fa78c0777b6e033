// What a reduction does with the ranks' elements. Shared by the client and the daemon; the numbers
// are those of gradsync.v1.ReduceOp on the wire.

#ifndef PROTO_GRADSYNC_REDUCE_OP_H_
#define PROTO_GRADSYNC_REDUCE_OP_H_

#include <cstdint>

#include "gradsync/data_type.h"

namespace gradsync {

enum class ReduceOp : std::uint8_t {
  kSum = 1,      // in host memory each node's ranks in order, then the nodes; integers wrap around
  kAverage = 2,  // the sum times 1/divisor; not of integers
  kMin = 3,      // NaN if an element is NaN; -0 is less than +0
  kMax = 4,      // the same
};

// The operation's name ("sum") in messages; "" if it is none.
constexpr const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "";
}

// True if the result does not depend on the order of the ranks: a minimum, a maximum, or a sum of
// integers. Nothing is rounded, and no statistics are measured.
constexpr bool IsOrderFree(ReduceOp op, DataType dtype) {
  return op == ReduceOp::kMin || op == ReduceOp::kMax || IsInteger(dtype);
}

// Where elements to reduce can be.
enum class ReducedMemory : std::uint8_t { kHost, kParameters, kGpu };

// Why gradsync does not do this reduction, and what to do instead; null if it does.
constexpr const char* WhyRefused(ReduceOp op, DataType dtype, ReducedMemory memory) {
  if (op == ReduceOp::kAverage && IsInteger(dtype)) {
    return "integers have no average here: sum them, and divide the sum";
  }
  if (IsOrderFree(op, dtype) && memory == ReducedMemory::kGpu) {
    return "integers, min and max are reduced in host memory, not on a GPU";
  }
  if (IsOrderFree(op, dtype) && memory == ReducedMemory::kParameters) {
    return "integers, min and max are for explicit_buckets, not for parameters";
  }
  return nullptr;
}

}  // namespace gradsync

#endif  // PROTO_GRADSYNC_REDUCE_OP_H_
