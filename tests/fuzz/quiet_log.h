// For fuzz targets of parts that log what they refuse.

#ifndef TESTS_FUZZ_QUIET_LOG_H_
#define TESTS_FUZZ_QUIET_LOG_H_

#include "daemon/base/logging.h"
#include "tests/fuzz/check.h"

namespace gradsync::fuzz {

// From the first call on, only errors are logged.
inline void QuietLog() {
  static const bool quiet = [] {
    daemon::LogOptions options;
    options.level = daemon::LogLevel::kError;
    return daemon::InitLogging(options).ok();
  }();
  FUZZ_CHECK(quiet);
}

}  // namespace gradsync::fuzz

#endif  // TESTS_FUZZ_QUIET_LOG_H_
