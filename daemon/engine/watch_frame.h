// What nodes tell each other on a PeerWatch's connections. Pure.

#ifndef DAEMON_ENGINE_WATCH_FRAME_H_
#define DAEMON_ENGINE_WATCH_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync {

struct WatchFrame {
  enum class Kind : std::uint32_t {
    kAlive = 1,  // and what it has begun
    kLeft = 2,   // it has closed its engine, with nothing pending, after what it had begun
    kFailed = 3,
  };
  Kind kind = Kind::kAlive;
  std::vector<std::uint64_t> begun;  // by lane; kAlive, kLeft
  absl::Status failure;              // kFailed
};

inline constexpr std::size_t kMaxWatchFrameBytes = 4096;

std::string EncodeWatchFrame(const WatchFrame& frame);

// Takes a whole frame from the front of `bytes`, and returns true; false if there is none yet.
// INVALID_ARGUMENT if this can become none of a peer with `lanes` lanes.
absl::StatusOr<bool> DecodeWatchFrame(absl::string_view* bytes, std::size_t lanes,
                                      WatchFrame* frame);

}  // namespace gradsync

#endif  // DAEMON_ENGINE_WATCH_FRAME_H_
