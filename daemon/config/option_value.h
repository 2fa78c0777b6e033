// How numbers, sizes and durations are written in flags and in the config file. Strict: nothing
// before, after or between, no sign, no fraction, no default unit for time.

#ifndef DAEMON_CONFIG_OPTION_VALUE_H_
#define DAEMON_CONFIG_OPTION_VALUE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync {

// Decimal digits. INVALID_ARGUMENT for another form; OUT_OF_RANGE if it does not fit.
absl::StatusOr<std::uint64_t> ParseCount(std::string_view text);

// "32MiB", "4096": digits and B, KiB, MiB, GiB or TiB; a bare number is bytes.
absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text);
// With the largest unit that divides it.
std::string FormatBytes(std::uint64_t bytes);

// "30s", "500ms", "1h30m".
absl::StatusOr<absl::Duration> ParseTime(std::string_view text);
// As ParseTime() reads it: "30m", not "1800s".
std::string FormatTime(absl::Duration duration);

// "true" or "false".
absl::StatusOr<bool> ParseBool(std::string_view text);

// For messages: quoted, escaped and cut to a length that fits a line.
std::string Quoted(std::string_view text);

}  // namespace gradsync

#endif  // DAEMON_CONFIG_OPTION_VALUE_H_
