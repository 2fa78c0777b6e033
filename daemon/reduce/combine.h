// The arithmetic of a bucket's local reduction, on the widest SIMD that the CPU has.

#ifndef DAEMON_REDUCE_COMBINE_H_
#define DAEMON_REDUCE_COMBINE_H_

#include <cstddef>

#include "absl/types/span.h"
#include "daemon/reduce/gradient_stats.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

// Writes (buffers[0] + buffers[1] + ...) * scale into every buffer, element by element, in one pass
// over the memory. Each buffer holds `count` elements, is aligned to 8 bytes (64 is fastest) and
// overlaps no other.
//
// The sum is taken in the order of `buffers`. float32 and float64 add and multiply in their own
// precision; float16 and bfloat16 add and multiply in float32 and are rounded once, to nearest
// even, on the way out. So the result depends on the elements alone: the SIMD target and the slices
// of a bucket do not change its bits. The exception is a NaN: it stays a NaN (and Inf - Inf becomes
// one), but its sign and payload are the CPU's choice. A scale of 1.0 leaves a sum as it is, and a
// single buffer with a scale of 1.0 is not touched. Subnormal numbers are kept.
//
// `stats`, unless null, gets the statistics of the result, measured in the same pass. Squares of
// float64 are summed in float64. Those of the other types are summed in float32 over blocks of a
// few thousand elements, and the blocks' sums in float64. The relative error is at most 1e-5, and
// usually 1e-7. If float32 cannot hold a block's sum, or the block has elements that are not
// finite, the block is read once more, while it is in the cache. The last bits of sum_of_squares
// depend on the SIMD target and on the slices; non_finite does not.
//
// Thread-safe for buffers that are not shared. The number of buffers and `count` may be 0. For
// integers and an unspecified dtype it does nothing; CombineOrderFree adds integers.
void Combine(DataType dtype, absl::Span<std::byte* const> buffers, std::size_t count, double scale,
             GradientStats* stats = nullptr);

// Measures a result that Combine wrote for several buffers. The statistics are the same, bit for
// bit, as Combine's. Writes the same elements into `buffer` again.
void MeasureAgain(DataType dtype, std::byte* buffer, std::size_t count, GradientStats* stats);

// The two halves of Combine, for sums that travel to other nodes in between. The work type is
// float32 for the 16-bit types, else `dtype` itself; `sum` is aligned to its elements.
//
// Writes buffers[0] + buffers[1] + ..., in this order, into `sum`; zeros if there are no buffers.
void SumInto(DataType dtype, absl::Span<const std::byte* const> buffers, std::size_t count,
             std::byte* sum);
// Writes `sum` * scale, rounded to `dtype`, into every buffer. Everything else is as for Combine.
void ScaleInto(DataType dtype, const std::byte* sum, std::size_t count, double scale,
               absl::Span<std::byte* const> buffers, GradientStats* stats = nullptr);

// Name of the SIMD target that Combine runs on ("AVX3" is AVX-512), for status.
const char* CombineTarget();

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_COMBINE_H_
