#include "daemon/base/log_limiter.h"

#include <iterator>

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kWindowNs = 1'000'000'000;
constexpr std::string_view kOtherMessages = "(other messages)";

}  // namespace

bool LogLimiter::Ended(const Window& window, std::uint64_t now_ns) {
  return now_ns - window.start_ns >= kWindowNs;
}

void LogLimiter::DropEnded(std::uint64_t now_ns, Windows* windows) {
  if (now_ns - windows->dropped_ns < kWindowNs) return;
  windows->dropped_ns = now_ns;
  auto& by_message = windows->by_message;
  for (auto it = by_message.begin(); it != by_message.end();) {
    const Window& window = it->second;
    it = window.suppressed == 0 && Ended(window, now_ns) ? by_message.erase(it) : std::next(it);
  }
}

bool LogLimiter::Allow(std::string_view message, const LogSubject& subject) {
  const std::uint64_t now_ns = clock_->NowNs();
  Windows& windows = windows_[subject.field];
  std::pair<std::string, std::string> key(message, subject.value);
  auto found = windows.by_message.find(key);
  if (found == windows.by_message.end()) {
    if (windows.by_message.size() >= kMaxMessages) DropEnded(now_ns, &windows);
    if (windows.by_message.size() >= kMaxMessages) key = {std::string(kOtherMessages), ""};
    found = windows.by_message.emplace(std::move(key), Window{}).first;
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
  if (window.suppressed++ == 0 && windows_suppressing_++ == 0) {
    look_ns_ = window.start_ns + kWindowNs;
  }
  return false;
}

std::vector<LogLimiter::Suppressed> LogLimiter::TakeSuppressed() { return Take(true); }

std::vector<LogLimiter::Suppressed> LogLimiter::TakeAllSuppressed() { return Take(false); }

std::vector<LogLimiter::Suppressed> LogLimiter::Take(bool ended_only) {
  std::vector<Suppressed> taken;
  if (windows_suppressing_ == 0) return taken;
  const std::uint64_t now_ns = clock_->NowNs();
  if (ended_only && now_ns < look_ns_) return taken;
  look_ns_ = now_ns + kWindowNs;
  for (auto& [field, windows] : windows_) {
    for (auto& [key, window] : windows.by_message) {
      if (window.suppressed == 0 || (ended_only && !Ended(window, now_ns))) continue;
      taken.push_back({key.first, {field, key.second}, window.suppressed});
      window.suppressed = 0;
      --windows_suppressing_;
    }
  }
  return taken;
}

}  // namespace gradsync::daemon
