// gradsyncd, put together: every room is constructed here, in one order, and torn down in the
// reverse of it.

#ifndef DAEMON_APP_DAEMON_H_
#define DAEMON_APP_DAEMON_H_

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/config/options.h"

namespace gradsync {

// A running daemon. Not thread-safe: main's own.
class Daemon {
 public:
  // Binds the sockets (or takes those that the service manager passed) and serves. Tells the
  // service manager (READY=1).
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Options& options);

  // Blocks SIGTERM and SIGINT in the calling thread and all that it starts later; call before
  // Start().
  static void BlockSignals();

  // Serves until SIGTERM or SIGINT, then drains: joins are refused, running steps may finish within
  // drain_timeout, sessions end UNAVAILABLE. A second signal cuts the drain short.
  void ServeUntilSignal();

  // Stops at once what ServeUntilSignal() left.
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

 private:
  struct Rooms;
  explicit Daemon(std::unique_ptr<Rooms> rooms);

  std::unique_ptr<Rooms> rooms_;
};

}  // namespace gradsync

#endif  // DAEMON_APP_DAEMON_H_
