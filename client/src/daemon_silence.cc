#include "client/src/daemon_silence.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/src/connection.h"
#include "gradsync/duration_text.h"

namespace gradsync::client {
namespace {

// Without a lease the daemon never counts as silent.
absl::Duration SliceOf(absl::Duration lease) {
  return lease > absl::ZeroDuration() ? lease / 2 : absl::InfiniteDuration();
}

}  // namespace

std::int64_t MonotonicNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

DaemonSilence::DaemonSilence(const Connection& connection)
    : connection_(connection),
      slice_(SliceOf(connection.lease())),
      since_ns_(MonotonicNs()),
      looked_ns_(since_ns_) {}

bool DaemonSilence::Look() {
  if (slice_ == absl::InfiniteDuration()) return false;
  const std::int64_t now_ns = MonotonicNs();
  // This process itself was stopped.
  if (now_ns - looked_ns_ > absl::ToInt64Nanoseconds(2 * slice_)) since_ns_ = now_ns;
  looked_ns_ = now_ns;
  since_ns_ = std::max({since_ns_, connection_.heard_ns(), connection_.said_ns()});
  return now_ns - since_ns_ >= absl::ToInt64Nanoseconds(2 * connection_.lease());
}

std::string DaemonSilence::Description() const {
  const auto silent = absl::Nanoseconds(MonotonicNs() - connection_.heard_ns());
  return absl::StrCat("gradsyncd has not answered for ", DurationText(silent), " (its lease is ",
                      DurationText(connection_.lease()),
                      "): check that it is not stopped (gradsyncctl health)");
}

Awaited AwaitUnlessSilent(absl::Mutex* mutex, const absl::Condition& condition, absl::Time deadline,
                          DaemonSilence* silence) {
  while (!mutex->AwaitWithDeadline(condition, std::min(deadline, absl::Now() + silence->slice()))) {
    if (absl::Now() >= deadline) return Awaited::kTimedOut;
    if (silence->Look()) return Awaited::kSilent;
  }
  return Awaited::kMet;
}

}  // namespace gradsync::client
