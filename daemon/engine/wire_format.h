// The type in which elements travel between nodes, and the arithmetic between it and the work type.

#ifndef DAEMON_ENGINE_WIRE_FORMAT_H_
#define DAEMON_ENGINE_WIRE_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "daemon/engine/engine_settings.h"
#include "proto/gradsync/data_type.h"

namespace gradsync::daemon {

// "same", "bfloat16", "float16".
const char* WireTypeName(WireType wire);

// The type on the wire of a bucket of `dtype`.
DataType WireDataType(DataType dtype, WireType wire);

// `wire` is float16 or bfloat16. Rounds to nearest even. Values out of range become Inf; a NaN
// stays a NaN.
void Narrow(DataType wire, const float* from, std::size_t count, std::byte* to);
void Widen(DataType wire, const std::byte* from, std::size_t count, float* to);

// to[i] = shards[0][i] + shards[1][i] + ..., in this order. 16-bit types are added in float32 and
// rounded once at the end; the others are added in their own type. `to` may be one of the shards.
// All are aligned to their elements. The result has the same bits on every SIMD target, except for
// the payloads of NaNs.
void SumShards(DataType wire, absl::Span<const std::byte* const> shards, std::size_t count,
               std::byte* to);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_WIRE_FORMAT_H_
