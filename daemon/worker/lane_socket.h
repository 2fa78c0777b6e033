// The socket through which a lane of an engine process asks the daemon to fill and empty its
// chunks.

#ifndef DAEMON_WORKER_LANE_SOCKET_H_
#define DAEMON_WORKER_LANE_SOCKET_H_

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {

// What a lane asks for: the gather() or scatter() of one chunk (engine.h).
struct ChunkRequest {
  enum Step : std::uint64_t { kGather = 1, kScatter = 2 };
  std::uint64_t step = 0;
  std::uint64_t exchange = 0;  // EngineExchange.exchange
  std::uint64_t first = 0;     // elements
  std::uint64_t count = 0;
  std::uint64_t offset = 0;  // of the sum in the lane's memory, in bytes
};

// One end of a SOCK_SEQPACKET pair. Owns its descriptor. One thread uses it; any thread may call
// Shutdown(). No call has a deadline. If the other process ends, every call returns.
class LaneSocket {
 public:
  explicit LaneSocket(UniqueFd fd) : fd_(std::move(fd)) {}
  static absl::StatusOr<std::pair<LaneSocket, LaneSocket>> Pair();
  UniqueFd Release() { return std::move(fd_); }

  // In the engine process: sends a request, and waits for the answer. False: the daemon has ended.
  bool Ask(const ChunkRequest& request) const;

  // In the daemon. Waits for a request. kEnd: the process has ended, or Shutdown() was called.
  enum class Taken : unsigned char { kRequest, kMalformed, kEnd };
  Taken Take(ChunkRequest* request) const;
  void Answer() const;
  void Shutdown() const;

 private:
  UniqueFd fd_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_WORKER_LANE_SOCKET_H_
