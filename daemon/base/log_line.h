// Formats a log line. Reads no clock and writes nothing.

#ifndef DAEMON_BASE_LOG_LINE_H_
#define DAEMON_BASE_LOG_LINE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "daemon/base/logging.h"

namespace gradsync::daemon {

// "DEBUG", "INFO", "WARNING", "ERROR".
const char* LogLevelName(LogLevel level);

// Returns one line without its newline. It is printable and valid UTF-8 for all values, and valid
// JSON or a list of key=value. Bytes that are not UTF-8 become U+FFFD. `unix_ns` is the time in
// nanoseconds since the epoch; the line has it as UTC with microseconds.
std::string FormatLogLine(LogFormat format, std::int64_t unix_ns, LogLevel level,
                          std::string_view message, absl::Span<const LogField> fields);

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_LOG_LINE_H_
