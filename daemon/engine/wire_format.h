// What travels between nodes: in which type, and the arithmetic between it and the work type.

#ifndef DAEMON_ENGINE_WIRE_FORMAT_H_
#define DAEMON_ENGINE_WIRE_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "daemon/engine/engine_settings.h"
#include "proto/gradsync/data_type.h"

namespace gradsync {

// "same", "bfloat16", "float16".
const char* WireTypeName(WireType wire);

// The type on the wire of a bucket of `dtype`.
DataType WireDataType(DataType dtype, WireType wire);

// `wire` is float16 or bfloat16. Rounds to nearest even; too large becomes Inf; a NaN stays one.
void Narrow(DataType wire, const float* from, std::size_t count, std::byte* to);
void Widen(DataType wire, const std::byte* from, std::size_t count, float* to);

// to[i] = shards[0][i] + shards[1][i] + ..., in this order, added in float32 (16-bit types, which
// are rounded once at the end) or in the type itself. `to` may be one of the shards, all of them
// are aligned to their elements. A function of the elements alone: the SIMD target changes no bit,
// NaNs' payloads aside.
void SumShards(DataType wire, absl::Span<const std::byte* const> shards, std::size_t count,
               std::byte* to);

}  // namespace gradsync

#endif  // DAEMON_ENGINE_WIRE_FORMAT_H_
