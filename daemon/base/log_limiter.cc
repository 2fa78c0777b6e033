#include "daemon/base/log_limiter.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kWindowNs = 1'000'000'000;
constexpr std::string_view kOtherMessages = "(other messages)";

}  // namespace

bool LogLimiter::Ended(const Window& window, std::uint64_t now_ns) const {
  return now_ns - window.start_ns >= kWindowNs;
}

bool LogLimiter::Allow(std::string_view message, std::string_view user) {
  std::pair<std::string, std::string> key(message, user);
  auto found = windows_.find(key);
  if (found == windows_.end()) {
    if (windows_.size() >= kMaxMessages) key = {std::string(kOtherMessages), ""};
    found = windows_.emplace(std::move(key), Window{}).first;
  }
  Window& window = found->second;
  const std::uint64_t now_ns = clock_->NowNs();
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
