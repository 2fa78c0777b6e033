// Writes log lines with fields, as text or JSON, to stderr or a file.
//
//   Log(LogLevel::kWarning, "rank lost", {{"job", job}, {"rank", rank}, {"step", step}});
//
//   2026-03-01T12:00:00.123456Z WARNING rank lost job=resnet rank=1 step=7
//   {"time":"2026-03-01T12:00:00.123456Z","level":"warning","message":"rank
//   lost","job":"resnet",...}
//
// The message is a constant; everything that varies is a field. Values may come from clients, so
// they are quoted, escaped and cut to kMaxLogValueBytes: a client cannot forge a line. Tokens and
// nonces are never fields; the value of such a key is written as "[redacted]".
//
// Thread-safe. The job, reduce and arena rooms do not log. They return statuses, which their
// callers log.

#ifndef DAEMON_BASE_LOGGING_H_
#define DAEMON_BASE_LOGGING_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/base/clock.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : std::uint8_t { kText, kJson };

inline constexpr std::size_t kMaxLogValueBytes = 1024;

// A field's value. It borrows text and users, so it lives only as long as the Log() expression
// around it.
class LogValue {
 public:
  enum class Kind : std::uint8_t { kText, kSigned, kUnsigned, kDouble, kBool, kUser };

  // Conversions are implicit, so that {"rank", rank} is a field.
  // NOLINTBEGIN(google-explicit-constructor)
  LogValue(absl::string_view text) : text_(text.data(), text.size()) {}
  LogValue(std::string_view text) : text_(text) {}
  LogValue(const std::string& text) : text_(text) {}
  LogValue(const char* text) : text_(text) {}
  LogValue(bool value) : kind_(Kind::kBool), unsigned_(value) {}
  LogValue(double value) : kind_(Kind::kDouble), double_(value) {}
  // The value of a field `uid`. If the user is in a pod, a field `pod` follows.
  LogValue(const Tenant& user) : kind_(Kind::kUser), user_(&user) {}
  template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  LogValue(T value) : kind_(std::is_signed_v<T> ? Kind::kSigned : Kind::kUnsigned) {
    if constexpr (std::is_signed_v<T>) {
      signed_ = value;
    } else {
      unsigned_ = value;
    }
  }
  // NOLINTEND(google-explicit-constructor)

  Kind kind() const { return kind_; }
  std::string_view text() const { return text_; }
  std::int64_t signed_value() const { return signed_; }
  std::uint64_t unsigned_value() const { return unsigned_; }
  double double_value() const { return double_; }
  bool bool_value() const { return unsigned_ != 0; }
  const Tenant& user() const { return *user_; }

 private:
  Kind kind_ = Kind::kText;
  std::string_view text_;
  union {
    std::int64_t signed_;
    std::uint64_t unsigned_ = 0;
    double double_;
    const Tenant* user_;
  };
};

// Keys are constants: lower_case words such as job, rank, step, bucket. A user is `uid`: a Tenant,
// or the bare number where the daemon does not know the pod.
struct LogField {
  std::string_view key;
  LogValue value;
};

struct LogOptions {
  // Lines below this level are dropped.
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  // File to which lines are appended. Empty: stderr, which journald and container runtimes collect.
  std::string file;
  // Clock of LogLimited(). Null: CLOCK_MONOTONIC. It outlives the last log line.
  const Clock* clock = nullptr;
};

// Sets where lines go. Called once, before threads log. Until then lines go to stderr as text.
// INVALID_ARGUMENT: the file cannot be opened for appending. Then nothing changes.
absl::Status InitLogging(const LogOptions& options);
// Whether InitLogging() can append to `file`, or to stderr if it is empty. Makes no file. Fails as
// InitLogging() does.
absl::Status CheckLogFile(const std::string& file);

// Writes one line. `message` is a constant.
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

// LogLimited() writes at most this many lines of one message per second.
inline constexpr int kLimitedLinesPerSecond = 10;

// Like Log(), for lines that clients can cause at will. After kLimitedLinesPerSecond lines of one
// message within a second, it only counts further lines. A line with a field `uid` counts for that
// user alone, in whatever pod. The first line of any message after that second is preceded by the
// count:
//   WARNING suppressed lines message="connection refused" count=312 uid=1000
void LogLimited(LogLevel level, std::string_view message,
                std::initializer_list<LogField> fields = {});

// The same for lines that another machine can cause. Such a line may name any user, so it counts
// only for its field `address`.
void LogLimitedByAddress(LogLevel level, std::string_view message,
                         std::initializer_list<LogField> fields);

// Writes the counts that LogLimited() still holds, and flushes the file. Called at the end of main.
void FlushLogging();

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_LOGGING_H_
