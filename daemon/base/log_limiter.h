// Keeps clients from flooding the log: it allows `limit` lines of one message and subject per
// second and counts the others.

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

// Lines with the same subject count together. The subject is a field of the line, with its value.
// No field: the line has no subject.
struct LogSubject {
  std::string_view field;  // a constant, such as "uid"
  std::string value;
};

// Thread-compatible. Messages are constants of the program, and subjects are few. If there are
// many, kMaxMessages bounds the memory for each field: all further messages of subjects with this
// field share one count, until windows have ended. So a large number of addresses does not affect
// the counts of users.
class LogLimiter {
 public:
  static constexpr std::size_t kMaxMessages = 1024;

  struct Suppressed {
    std::string message;
    LogSubject subject;
    std::uint64_t count = 0;
  };

  // `clock` outlives this object.
  LogLimiter(const Clock* clock, int limit) : clock_(clock), limit_(limit) {}

  // True if a line of `message` may be written now. A second begins with its first line. Each
  // subject has its own limit, so that one subject's lines do not crowd out another's.
  bool Allow(std::string_view message, const LogSubject& subject = {});

  // Returns how many lines of each message were suppressed in seconds that have ended, and forgets
  // these counts. Cheap if nothing was suppressed, or if it has looked within the last second.
  std::vector<Suppressed> TakeSuppressed();
  // The same, including the seconds that have not ended.
  std::vector<Suppressed> TakeAllSuppressed();

 private:
  struct Window {
    std::uint64_t start_ns = 0;
    int written = 0;
    std::uint64_t suppressed = 0;
  };

  // The windows of all subjects with the same field.
  struct Windows {
    std::map<std::pair<std::string, std::string>, Window> by_message;  // and by subject
    std::uint64_t dropped_ns = 0;  // when DropEnded last looked for ended windows
  };

  static bool Ended(const Window& window, std::uint64_t now_ns);
  // Forgets the windows that have ended. Looks at most once in the length of a window.
  static void DropEnded(std::uint64_t now_ns, Windows* windows);
  std::vector<Suppressed> Take(bool ended_only);

  const Clock* const clock_;
  const int limit_;
  std::map<std::string_view, Windows> windows_;  // by field
  std::size_t windows_suppressing_ = 0;
  std::uint64_t look_ns_ = 0;  // when TakeSuppressed() looks next: once in a second
};

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_LOG_LIMITER_H_
