// Keeps clients from flooding the log: at most `limit` lines of one message per second, the rest
// counted.

#ifndef DAEMON_BASE_LOG_LIMITER_H_
#define DAEMON_BASE_LOG_LIMITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/clock.h"

namespace gradsync {

// Not thread-safe. Messages are constants of the program; should they not be, kMaxMessages bounds
// the memory and all further messages share one count.
class LogLimiter {
 public:
  static constexpr std::size_t kMaxMessages = 1024;

  struct Suppressed {
    std::string message;
    std::uint64_t count = 0;
  };

  // `clock` outlives this.
  LogLimiter(const Clock* clock, int limit) : clock_(clock), limit_(limit) {}

  // Whether a line of `message` may be written now. A second begins with the first line in it.
  bool Allow(std::string_view message);

  // Messages whose second has passed and of which lines were suppressed, each told once. Cheap
  // while nothing is suppressed.
  std::vector<Suppressed> TakeSuppressed();
  // The same for seconds that still run.
  std::vector<Suppressed> TakeAllSuppressed();

 private:
  struct Window {
    std::uint64_t start_ns = 0;
    int written = 0;
    std::uint64_t suppressed = 0;
  };

  bool Ended(const Window& window, std::uint64_t now_ns) const;
  std::vector<Suppressed> Take(bool ended_only);

  const Clock* const clock_;
  const int limit_;
  std::map<std::string, Window, std::less<>> windows_;
  std::size_t windows_suppressing_ = 0;
};

}  // namespace gradsync

#endif  // DAEMON_BASE_LOG_LIMITER_H_
