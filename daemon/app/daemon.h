// Composes the daemon: constructs its rooms in order, and tears them down in the reverse order.

#ifndef DAEMON_APP_DAEMON_H_
#define DAEMON_APP_DAEMON_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/app/stop_guard.h"
#include "daemon/config/options.h"

namespace gradsync::daemon {

// A running daemon. Thread-compatible: main owns and uses it.
class Daemon {
 public:
  // Validates what Start() validates before it listens: the sockets' paths, and the files and
  // addresses for other nodes. Changes nothing, and may run beside a daemon with the same options.
  // Fails as Start() does.
  static absl::Status Check(const Options& options);

  // Binds the sockets, or takes those of the service manager, and serves. Notifies the service
  // manager (READY=1). `guard` outlives the daemon, and watches its stop.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Options& options, StopGuard* guard);

  // Blocks SIGTERM and SIGINT in the calling thread and in all threads that it starts later. Called
  // before Start(), and before the guard is made.
  static void BlockSignals();

  // Serves until SIGTERM or SIGINT, then drains: it refuses joins, lets running steps finish within
  // drain_timeout, and ends the sessions with UNAVAILABLE. A second signal shortens the drain. The
  // guard allows drain_timeout plus kStopLimit from the first signal, and kStopLimit from the end
  // of the drain.
  void ServeUntilSignal();

  // Stops at once everything that ServeUntilSignal() left running.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

 private:
  struct Rooms;
  Daemon(std::unique_ptr<Rooms> rooms, StopGuard* guard);

  StopGuard* const guard_;
  std::unique_ptr<Rooms> rooms_;
};

}  // namespace gradsync::daemon

#endif  // DAEMON_APP_DAEMON_H_
