#include "daemon/base/log_limiter.h"

#include <iterator>

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kWindowNs = 1'000'000'000;
constexpr std::string_view kOtherMessages = "(other messages)";

}  // namespace

bool LogLimiter::Ended(const Window& window, std::uint64_t now_ns) const {
  return now_ns - window.start_ns >= kWindowNs;
}

void LogLimiter::DropEnded(std::uint64_t now_ns) {
  if (now_ns - dropped_ns_ < kWindowNs) return;
  dropped_ns_ = now_ns;
  for (auto it = windows_.begin(); it != windows_.end();) {
    const Window& window = it->second;
    it = window.suppressed == 0 && Ended(window, now_ns) ? windows_.erase(it) : std::next(it);
  }
}

bool LogLimiter::Allow(std::string_view message, std::string_view user) {
  const std::uint64_t now_ns = clock_->NowNs();
  std::pair<std::string, std::string> key(message, user);
  auto found = windows_.find(key);
  if (found == windows_.end()) {
    if (windows_.size() >= kMaxMessages) DropEnded(now_ns);
    if (windows_.size() >= kMaxMessages) key = {std::string(kOtherMessages), ""};
    found = windows_.emplace(std::move(key), Window{}).first;
  }
  Window& window = found->second;
  if (window.written == 0 || Ended(window, now_ns)) {
    window.start_ns = now_ns;
    window.written = 0;
  }
  if (window.written < limit_) {
    ++window.written;
    return true;
  }
  if (window.suppressed++ == 0) ++windows_suppressing_;
  return false;
}

std::vector<LogLimiter::Suppressed> LogLimiter::TakeSuppressed() { return Take(true); }

std::vector<LogLimiter::Suppressed> LogLimiter::TakeAllSuppressed() { return Take(false); }

std::vector<LogLimiter::Suppressed> LogLimiter::Take(bool ended_only) {
  std::vector<Suppressed> taken;
  if (windows_suppressing_ == 0) return taken;
  const std::uint64_t now_ns = clock_->NowNs();
  for (auto& [key, window] : windows_) {
    if (window.suppressed == 0 || (ended_only && !Ended(window, now_ns))) continue;
    taken.push_back({key.first, key.second, window.suppressed});
    window.suppressed = 0;
    --windows_suppressing_;
  }
  return taken;
}

}  // namespace gradsync::daemon
