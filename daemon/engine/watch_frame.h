// The messages on a PeerWatch's connections. Pure functions.

#ifndef DAEMON_ENGINE_WATCH_FRAME_H_
#define DAEMON_ENGINE_WATCH_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gradsync::daemon {

struct WatchFrame {
  enum class Kind : std::uint32_t {
    kAlive = 1,   // the node lives; `begun`: chunks that it has begun
    kLeft = 2,    // the node has ended its engine in order, after `begun` chunks
    kFailed = 3,  // the node's engine has failed
  };
  Kind kind = Kind::kAlive;
  std::vector<std::uint64_t> begun;  // by lane; kAlive, kLeft
  absl::Status failure;              // kFailed
};

inline constexpr std::size_t kMaxWatchFrameBytes = 4096;

std::string EncodeWatchFrame(const WatchFrame& frame);

// Takes a whole frame from the front of `bytes` and returns true. Returns false if part of the
// frame has not come yet. INVALID_ARGUMENT if it cannot become a frame of a node with `lanes`
// lanes.
absl::StatusOr<bool> DecodeWatchFrame(absl::string_view* bytes, std::size_t lanes,
                                      WatchFrame* frame);

}  // namespace gradsync::daemon

#endif  // DAEMON_ENGINE_WATCH_FRAME_H_
