// Counts the streams that exist.

#ifndef DAEMON_RPC_STREAM_COUNT_H_
#define DAEMON_RPC_STREAM_COUNT_H_

#include <chrono>
#include <cstddef>
#include <memory>

#include "daemon/base/mutex.h"

namespace gradsync::daemon {

// How long a service that ends waits for its streams.
inline constexpr std::chrono::seconds kStopPatience(5);
// A connection without a stream is closed after this.
inline constexpr int kIdleConnectionMs = 30'000;

// Thread-safe. The streams may outlive it. A thread of gRPC may drop the last reference to a
// stream; nothing else in the daemon notices that.
class StreamCount {
 public:
  // A stream holds the result as long as it exists.
  std::shared_ptr<void> Add();
  std::size_t Get() const;
  // Waits until no stream exists. False if `deadline` has passed first.
  bool WaitForNone(std::chrono::steady_clock::time_point deadline) const;

 private:
  struct State {
    Mutex mutex;
    CondVar none;
    std::size_t count ABSL_GUARDED_BY(mutex) = 0;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gradsync::daemon

#endif  // DAEMON_RPC_STREAM_COUNT_H_
