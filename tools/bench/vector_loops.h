// The element-wise loops of the bench, each at the widest vectors that this processor has. 16-bit
// types are added and scaled in float32.

#ifndef TOOLS_BENCH_VECTOR_LOOPS_H_
#define TOOLS_BENCH_VECTOR_LOOPS_H_

#include <cstddef>
#include <cstdint>

#include "proto/gradsync/data_type.h"

namespace gradsync::bench {

// How the roofline's loop asks for memory. Which is faster depends on the machine and the size.
enum class Prefetch : std::uint8_t { kHardware, kAhead };

// The roofline: for i in [begin, end): buffers[0][i] = ... = buffers[ranks-1][i] = their average.
// At least 2 ranks; `begin` a multiple of kLoopAlignment elements; buffers 64-byte aligned
// and readable and writable up to the next multiple of kLoopAlignment elements after `end`.
inline constexpr std::size_t kLoopAlignment = 128;
void AverageInPlace(DataType dtype, Prefetch prefetch, std::byte* const* buffers,
                    std::uint32_t ranks, std::size_t begin, std::size_t end);

// sum[i] = a[i] + b[i]. Any alignment and count; `sum` may be `a` or `b`.
void Add(DataType dtype, void* sum, const void* a, const void* b, std::size_t count);

// data[i] *= factor. Any alignment and count.
void Scale(DataType dtype, void* data, std::size_t count, double factor);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_VECTOR_LOOPS_H_
