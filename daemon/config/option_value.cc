#include "daemon/config/option_value.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

struct Unit {
  std::string_view name;
  int shift;
};
constexpr Unit kByteUnits[] = {{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"B", 0}};

bool AllDigits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

}  // namespace

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMaxBytes = 120;
  const std::string shown(text.substr(0, kMaxBytes));
  return absl::StrCat("\"", absl::CHexEscape(shown), text.size() > kMaxBytes ? "..." : "", "\"");
}

absl::StatusOr<std::uint64_t> ParseCount(std::string_view text) {
  if (!AllDigits(text)) {
    return absl::InvalidArgumentError(absl::StrCat(Quoted(text), " is not a whole number"));
  }
  std::uint64_t value = 0;
  if (!absl::SimpleAtoi(std::string(text), &value)) {
    return absl::OutOfRangeError(absl::StrCat(Quoted(text), " is too large"));
  }
  return value;
}

absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string_view unit = text.substr(digits);
  for (const Unit& known : kByteUnits) {
    if (digits == 0 || (unit != known.name && !unit.empty())) continue;
    auto value = ParseCount(text.substr(0, digits));
    const int shift = unit.empty() ? 0 : known.shift;
    if (!value.ok() || *value > std::numeric_limits<std::uint64_t>::max() >> shift) {
      return absl::OutOfRangeError(absl::StrCat(Quoted(text), " is too large"));
    }
    return *value << shift;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Quoted(text), " is not a size: a whole number and B, KiB, MiB, GiB or TiB, such as 32MiB"));
}

std::string FormatBytes(std::uint64_t bytes) {
  for (const Unit& unit : kByteUnits) {
    if (bytes != 0 && bytes % (std::uint64_t{1} << unit.shift) == 0) {
      return absl::StrCat(bytes >> unit.shift, std::string(unit.name));
    }
  }
  return "0B";
}

absl::StatusOr<absl::Duration> ParseTime(std::string_view text) {
  // ParseDuration() alone also takes signs, fractions, "inf" and units down to nanoseconds.
  absl::Duration value;
  const bool form = !text.empty() && absl::ascii_isdigit(text.front()) &&
                    absl::ascii_isalpha(text.back()) &&
                    text.find_first_not_of("0123456789hms") == std::string_view::npos;
  if (!form || !absl::ParseDuration(std::string(text), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(text),
                     " is not a duration: whole numbers with ms, s, m or h, such as 30s or 1h30m"));
  }
  if (value == absl::InfiniteDuration()) {
    return absl::OutOfRangeError(absl::StrCat(Quoted(text), " is too long"));
  }
  return value;
}

std::string FormatTime(absl::Duration duration) {
  struct TimeUnit {
    absl::Duration size;
    const char* name;
  };
  if (duration == absl::InfiniteDuration()) return "inf";
  std::string text;
  for (const TimeUnit& unit :
       {TimeUnit{absl::Hours(1), "h"}, TimeUnit{absl::Minutes(1), "m"},
        TimeUnit{absl::Seconds(1), "s"}, TimeUnit{absl::Milliseconds(1), "ms"}}) {
    const std::int64_t count = absl::IDivDuration(duration, unit.size, &duration);
    if (count > 0) absl::StrAppend(&text, count, unit.name);
  }
  return text.empty() ? "0s" : text;
}

absl::StatusOr<bool> ParseBool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return absl::InvalidArgumentError(absl::StrCat(Quoted(text), " is neither true nor false"));
}

}  // namespace gradsync::daemon
