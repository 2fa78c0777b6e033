#include "daemon/engine/engine_settings.h"

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {

absl::Status ValidateEngine(const EngineSettings& settings, std::uint32_t nodes) {
  if (nodes < kMinEngineNodes || nodes > kMaxEngineNodes) {
    return absl::InvalidArgumentError(
        absl::StrCat("nodes must be ", kMinEngineNodes, " to ", kMaxEngineNodes));
  }
  if (settings.lanes < 1 || settings.lanes > EngineSettings::kMaxLanes) {
    return absl::InvalidArgumentError(
        absl::StrCat("lanes must be 1 to ", EngineSettings::kMaxLanes));
  }
  if (settings.chunk_bytes < EngineSettings::kMinChunkBytes ||
      settings.chunk_bytes > EngineSettings::kMaxChunkBytes ||
      settings.chunk_bytes % EngineSettings::kMinChunkBytes != 0) {
    return absl::InvalidArgumentError("chunk_bytes must be a multiple of 32 KiB, up to 64 MiB");
  }
  if (settings.chunk_bytes >
      EngineSettings::kMaxLaneBytes / static_cast<unsigned>(settings.lanes)) {
    return absl::InvalidArgumentError("lanes times chunk_bytes must be at most 64 MiB");
  }
  if (settings.wire < WireType::kSame || settings.wire > WireType::kFloat16) {
    return absl::InvalidArgumentError("wire is no WireType");
  }
  if (settings.silence_limit < EngineSettings::kMinSilence ||
      settings.silence_limit > EngineSettings::kMaxSilence) {
    return absl::InvalidArgumentError("silence_limit must be 100 ms to 24 h");
  }
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
