// Calls the HeapTrimmer while a client or another node uses the daemon. Goes on afterwards, until
// the freed memory has gone back to the system.

#ifndef DAEMON_BASE_TRIM_TICKER_H_
#define DAEMON_BASE_TRIM_TICKER_H_

#include <atomic>
#include <chrono>

#include "daemon/base/clock.h"
#include "daemon/base/heap_trimmer.h"
#include "daemon/base/ticker.h"

namespace gradsync::daemon {

// Thread-safe. Owns a thread, which sleeps while nobody uses the daemon.
class TrimTicker {
 public:
  // Both outlive it. Nobody uses the daemon if Used() was not called for a `period`.
  TrimTicker(HeapTrimmer* trimmer, const Clock* clock,
             std::chrono::milliseconds period = std::chrono::seconds(1))
      : trimmer_(trimmer), clock_(clock), ticker_(period, [this] { return Tick(); }) {}

  // Somebody uses the daemon. Call it several times a second for as long as that is so.
  void Used() {
    used_.store(true);
    ticker_.Wake();
  }

 private:
  // False: nobody uses the daemon, and it has trimmed.
  bool Tick() {
    if (!used_.exchange(false)) return trimmer_->TickUnused(clock_->NowNs());
    trimmer_->Tick(clock_->NowNs());
    return true;
  }

  HeapTrimmer* const trimmer_;
  const Clock* const clock_;
  std::atomic<bool> used_{false};  // since the last Tick()
  Ticker ticker_;                  // last
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_TRIM_TICKER_H_
