// How the nodes of an engine exchange: the same on every node, or they do not meet. The coordinator
// of a job decides and tells the others.

#ifndef DAEMON_ENGINE_ENGINE_SETTINGS_H_
#define DAEMON_ENGINE_ENGINE_SETTINGS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace gradsync {

// How float32 buckets travel. The other types travel as they are: float64 was chosen for its
// precision, and 16 bits hold no more than 16-bit gradients have.
enum class WireType : std::uint8_t { kSame = 1, kBfloat16, kFloat16 };

struct EngineSettings {
  static constexpr int kMaxLanes = 16;
  static constexpr std::size_t kMinChunkBytes = std::size_t{32} << 10;
  static constexpr std::size_t kMaxChunkBytes = std::size_t{64} << 20;
  static constexpr absl::Duration kMinSilence = absl::Milliseconds(100);
  static constexpr absl::Duration kMaxSilence = absl::Hours(24);

  // Connections between every two nodes, each with a thread on either side, 1 to kMaxLanes; and of
  // a chunk in the work type, a multiple of kMinChunkBytes, to kMaxChunkBytes. A lane has four to
  // five chunks' memory.
  // tests/engine/engine_bench.sh, 2 nodes on one machine with 2 busy cores: at 1 Gbit/s any choice
  // fills the wire (25 MiB in 219.6 ms; with TCP's headers its bits take 219.3), at 10
  // Gbit/s fewer and larger messages count: 25 MiB in 37, 31, 26 ms with 1, 2, 4 lanes and 1 MiB,
  // 30, 25, 27 with 2 MiB, 28, 23, 24 with 4 MiB.
  int lanes = 2;
  std::size_t chunk_bytes = std::size_t{2} << 20;
  WireType wire = WireType::kSame;
  // A node that says nothing for so long is lost; kMinSilence to kMaxSilence. Every rank is to know
  // of a dead link after 10 s.
  absl::Duration silence_limit = absl::Seconds(8);
};

}  // namespace gradsync

#endif  // DAEMON_ENGINE_ENGINE_SETTINGS_H_
