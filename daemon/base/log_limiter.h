// Keeps clients from flooding the log: it allows `limit` lines of one message and user per second
// and counts the others.

#ifndef DAEMON_BASE_LOG_LIMITER_H_
#define DAEMON_BASE_LOG_LIMITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"

namespace gradsync::daemon {

// Thread-compatible. Messages are constants of the program, and users are few. If they are not,
// kMaxMessages bounds the memory: all further messages share one count, until windows have ended.
class LogLimiter {
 public:
  static constexpr std::size_t kMaxMessages = 1024;

  struct Suppressed {
    std::string message;
    std::string user;
    std::uint64_t count = 0;
  };

  // `clock` outlives this.
  LogLimiter(const Clock* clock, int limit) : clock_(clock), limit_(limit) {}

  // True if a line of `message` may be written now. A second begins with its first line. Each
  // `user` has lines of its own, so that nobody's lines crowd out another user's. Empty: the line
  // is about no user.
  bool Allow(std::string_view message, std::string_view user = "");

  // Returns how many lines of each message were suppressed in seconds that have ended, and forgets
  // these counts. Cheap if nothing was suppressed.
  std::vector<Suppressed> TakeSuppressed();
  // The same, including the seconds that have not ended.
  std::vector<Suppressed> TakeAllSuppressed();

 private:
  struct Window {
    std::uint64_t start_ns = 0;
    int written = 0;
    std::uint64_t suppressed = 0;
  };

  bool Ended(const Window& window, std::uint64_t now_ns) const;
  // Forgets the windows that have ended, at most once in a window's time.
  void DropEnded(std::uint64_t now_ns);
  std::vector<Suppressed> Take(bool ended_only);

  const Clock* const clock_;
  const int limit_;
  // By message and user.
  std::map<std::pair<std::string, std::string>, Window> windows_;
  std::size_t windows_suppressing_ = 0;
  std::uint64_t dropped_ns_ = 0;  // when DropEnded looked for the last time
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_LOG_LIMITER_H_
