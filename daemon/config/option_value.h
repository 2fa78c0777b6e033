// Reads and writes numbers, sizes and durations of flags and the config file. Reading is strict: no
// spaces, no sign, no fraction. A duration needs a unit.

#ifndef DAEMON_CONFIG_OPTION_VALUE_H_
#define DAEMON_CONFIG_OPTION_VALUE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace gradsync::daemon {

// Reads decimal digits. INVALID_ARGUMENT: another form. OUT_OF_RANGE: the number does not fit.
absl::StatusOr<std::uint64_t> ParseCount(std::string_view text);

// Reads "32MiB" or "4096": digits and B, KiB, MiB, GiB or TiB. A number without a unit is bytes.
absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text);
// Uses the largest unit that divides `bytes`.
std::string FormatBytes(std::uint64_t bytes);

// Reads "30s", "500ms" or "1h30m".
absl::StatusOr<absl::Duration> ParseTime(std::string_view text);
// Writes what ParseTime() reads: "30m", not "1800s". "inf" for an infinite time.
std::string FormatTime(absl::Duration duration);

// Reads "true" or "false".
absl::StatusOr<bool> ParseBool(std::string_view text);

// Quotes and escapes text for an error message, and cuts it so that it fits a line.
std::string Quoted(std::string_view text);

}  // namespace gradsync::daemon

#endif  // DAEMON_CONFIG_OPTION_VALUE_H_
