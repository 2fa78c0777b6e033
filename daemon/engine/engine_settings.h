// How the nodes of an engine exchange data. The job's coordinator chooses the settings and sends
// them to the other nodes: engines with different settings refuse to connect.

#ifndef DAEMON_ENGINE_ENGINE_SETTINGS_H_
#define DAEMON_ENGINE_ENGINE_SETTINGS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace gradsync::daemon {

// The type in which float32 buckets travel. Buckets of the other types travel unchanged: a job with
// float64 wants its precision, and 16-bit types are as small as the wire's.
enum class WireType : std::uint8_t { kSame = 1, kBfloat16, kFloat16 };

struct EngineSettings {
  static constexpr int kMaxLanes = 16;
  static constexpr std::size_t kMinChunkBytes = std::size_t{32} << 10;
  static constexpr std::size_t kMaxChunkBytes = std::size_t{64} << 20;
  // The most bytes of `lanes` times `chunk_bytes`: bounds the memory that another node can make an
  // engine take.
  static constexpr std::size_t kMaxLaneBytes = std::size_t{64} << 20;
  static constexpr absl::Duration kMinSilence = absl::Milliseconds(100);
  static constexpr absl::Duration kMaxSilence = absl::Hours(24);

  // `lanes`: connections between every two nodes, 1 to kMaxLanes; each has a thread on both sides.
  // `chunk_bytes`: bytes of a chunk in the work type, a multiple of kMinChunkBytes up to
  // kMaxChunkBytes. A lane has memory for five chunks and a little more (lane_memory.h).
  //
  // The defaults come from tests/engine/engine_bench.sh, with 2 nodes on one machine with 2 busy
  // cores. At 1 Gbit/s every choice fills the wire: 25 MiB take 219.6 ms, and their bits and TCP's
  // headers take 219.3 ms of it. At 10 Gbit/s fewer and larger messages are faster. The times for
  // 25 MiB in ms, with 1, 2 and 4 lanes:
  //   chunks of 1 MiB  37, 31, 26
  //   chunks of 2 MiB  30, 25, 27
  //   chunks of 4 MiB  28, 23, 24
  int lanes = 2;
  std::size_t chunk_bytes = std::size_t{2} << 20;
  WireType wire = WireType::kSame;
  // The engine fails (ENGINE_TIMEOUT) if a node sends nothing for this long; kMinSilence to
  // kMaxSilence. With 8 s every rank learns of a lost connection within 10 s.
  absl::Duration silence_limit = absl::Seconds(8);
};

// The most that an engine may have on one node, whatever node coordinates the job.
struct EngineLimits {
  int lanes = EngineSettings::kMaxLanes;
  // A multiple of EngineSettings::kMinChunkBytes.
  std::size_t chunk_bytes = EngineSettings::kMaxChunkBytes;
};

// How many nodes an engine may have.
inline constexpr std::uint32_t kMinEngineNodes = 2;
inline constexpr std::uint32_t kMaxEngineNodes = 256;

// INVALID_ARGUMENT if a setting, or the number of nodes, is out of its bounds. The coordinator of
// another node may have chosen both.
absl::Status ValidateEngine(const EngineSettings& settings, std::uint32_t nodes);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_ENGINE_SETTINGS_H_
