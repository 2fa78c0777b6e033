// The arithmetic of reductions whose result does not depend on the order: minimum, maximum, and
// sums of integers. On the widest SIMD that the CPU has.

#ifndef DAEMON_REDUCE_COMBINE_ORDER_FREE_H_
#define DAEMON_REDUCE_COMBINE_ORDER_FREE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "proto/gradsync/data_type.h"
#include "proto/gradsync/reduce_op.h"

namespace gradsync::daemon {

// Writes the sum, minimum or maximum of from[0], from[1], ..., element by element, into every
// buffer of `to`, in one pass over the memory. Each buffer holds `count` elements, aligned for
// their type. A buffer of `to` may be one of `from`; otherwise none overlaps another.
//
// Sums of integers wrap around. A minimum or maximum is NaN if an element is NaN, and -0 is less
// than +0. So the bits of the result do not depend on the order or the parts in which the buffers
// are combined, except for the sign and payload of a NaN.
//
// If `from` is empty, writes the element that changes no result: zero for a sum, the largest value
// (Inf) for a minimum, the least for a maximum.
//
// Requires IsOrderFree(op, dtype). Thread-safe for buffers that are not shared.
void CombineOrderFree(ReduceOp op, DataType dtype, absl::Span<const std::byte* const> from,
                      std::size_t count, absl::Span<std::byte* const> to);
// The same, in place: every buffer gets the result of all. A single buffer is not touched.
void CombineOrderFree(ReduceOp op, DataType dtype, absl::Span<std::byte* const> buffers,
                      std::size_t count);

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_COMBINE_ORDER_FREE_H_
