// Distinguishes a daemon that is stopped from a daemon that has nothing to say.

#ifndef CLIENT_SRC_DAEMON_SILENCE_H_
#define CLIENT_SRC_DAEMON_SILENCE_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace gradsync::client {

class Connection;

// CLOCK_MONOTONIC.
std::int64_t MonotonicNs();

// Belongs to one wait, which calls Look after every slice of its time. A running daemon sends a
// LeaseQuestion when it has heard nothing for a third of the lease. So the daemon counts as silent
// if nothing arrives for two leases after the latest of: the start of the wait, the last message
// that arrived, the last one that was sent. Time in which this process was stopped does not count.
// Thread-compatible.
class DaemonSilence {
 public:
  explicit DaemonSilence(const Connection& connection);

  // How long to wait before the next Look.
  absl::Duration slice() const { return slice_; }
  // True if the daemon is silent.
  bool Look();
  // For an error's message: for how long nothing arrived.
  std::string Description() const;

 private:
  const Connection& connection_;
  const absl::Duration slice_;
  std::int64_t since_ns_;
  std::int64_t looked_ns_;
};

enum class Awaited { kMet, kTimedOut, kSilent };

// Waits for `condition` until `deadline`, or until the daemon is silent.
Awaited AwaitUnlessSilent(absl::Mutex* mutex, const absl::Condition& condition, absl::Time deadline,
                          DaemonSilence* silence) ABSL_SHARED_LOCKS_REQUIRED(mutex);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DAEMON_SILENCE_H_
