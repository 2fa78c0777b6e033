// The memory of an engine's lanes. A lane has two slots, for the two chunks that are under way. A
// slot holds a chunk in the work type, the chunk in a narrower wire type, and an inbox with one
// shard per node.

#ifndef DAEMON_ENGINE_LANE_MEMORY_H_
#define DAEMON_ENGINE_LANE_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace gradsync::daemon {

inline constexpr std::size_t kLaneSlots = 2;
// Shards and chunks begin at multiples of this many elements, and slots at multiples of this many
// bytes.
inline constexpr std::size_t kShardItems = 64;
inline constexpr std::size_t kSlotAlignment = 64;

// `chunk_bytes` and `nodes` must have passed ValidateEngine().
constexpr std::size_t SlotBytes(std::size_t chunk_bytes, std::uint32_t nodes) {
  // The inbox holds one shard per node. Rounded up, the shards exceed the chunk by less than this.
  const std::size_t inbox = chunk_bytes + 8 * kShardItems * std::size_t{nodes};
  const std::size_t bytes = chunk_bytes + chunk_bytes / 2 + inbox;
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

constexpr std::size_t LaneBytes(std::size_t chunk_bytes, std::uint32_t nodes) {
  return kLaneSlots * SlotBytes(chunk_bytes, nodes);
}

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_LANE_MEMORY_H_
