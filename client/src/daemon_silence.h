// Telling a daemon that is stopped from one that has nothing to say.

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

// Accompanies one wait, which looks at it after every slice. The daemon asks a LeaseQuestion after
// a third of the lease in which it heard nothing, so that a living one is heard; it is silent when
// it was not for two leases of the wait, counted from what this side said last. Time in which this
// process was stopped itself does not count. Thread-compatible.
class DaemonSilence {
 public:
  explicit DaemonSilence(const Connection& connection);

  // How long to wait before the next look.
  absl::Duration slice() const { return slice_; }
  bool Look();
  // For an error's message: how long nothing was heard.
  std::string Description() const;

 private:
  const Connection& connection_;
  const absl::Duration slice_;
  std::int64_t since_ns_;
  std::int64_t looked_ns_;
};

enum class Awaited { kMet, kTimedOut, kSilent };

// Waits for `condition`.
Awaited AwaitUnlessSilent(absl::Mutex* mutex, const absl::Condition& condition, absl::Time deadline,
                          DaemonSilence* silence) ABSL_SHARED_LOCKS_REQUIRED(mutex);

}  // namespace gradsync::client

#endif  // CLIENT_SRC_DAEMON_SILENCE_H_
