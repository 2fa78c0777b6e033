// The text of one log line. Pure: no clock, no output.

#ifndef DAEMON_BASE_LOG_LINE_H_
#define DAEMON_BASE_LOG_LINE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "daemon/base/logging.h"

namespace gradsync {

// "DEBUG", "INFO", "WARNING", "ERROR".
const char* LogLevelName(LogLevel level);

// One line without its newline: printable, valid UTF-8 and valid JSON (or one key=value each),
// whatever the values hold. Bytes that are not UTF-8 become U+FFFD. `unix_ns`: nanoseconds since
// the epoch; written as UTC with microseconds.
std::string FormatLogLine(LogFormat format, std::int64_t unix_ns, LogLevel level,
                          std::string_view message, absl::Span<const LogField> fields);

}  // namespace gradsync

#endif  // DAEMON_BASE_LOG_LINE_H_
