#include "tools/gradsyncctl/quantity.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gradsync {
namespace {

std::string ThreeDigits(double value) {
  if (value == 0.0) return "0";
  if (value < 9.995) return absl::StrFormat("%.2f", value);
  if (value < 99.95) return absl::StrFormat("%.1f", value);
  return absl::StrFormat("%.0f", value);
}

}  // namespace

std::string FormatMicroseconds(double us) {
  if (us < 999.5) return absl::StrCat(ThreeDigits(us), " us");
  if (us < 999.5e3) return absl::StrCat(ThreeDigits(us / 1e3), " ms");
  if (us < 120e6) return absl::StrCat(ThreeDigits(us / 1e6), " s");
  return absl::StrCat(ThreeDigits(us / 60e6), " min");
}

std::string FormatUptime(double seconds) {
  // A century bounds what the conversion below may meet.
  const auto total = static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 3.2e9));
  const std::uint64_t days = total / 86'400;
  const std::uint64_t hours = total / 3600 % 24;
  const std::uint64_t minutes = total / 60 % 60;
  if (days > 0) return absl::StrCat(days, " d ", hours, " h");
  if (hours > 0) return absl::StrCat(hours, " h ", minutes, " min");
  if (minutes > 0) return absl::StrCat(minutes, " min ", total % 60, " s");
  return absl::StrCat(total, " s");
}

std::string FormatBytes(std::uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  for (; value >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1024.0;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatRanks(const std::vector<std::uint32_t>& ranks) {
  if (ranks.empty()) return "-";
  std::string text;
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ", ", ranks[first]);
    if (last > first) absl::StrAppend(&text, "-", ranks[last]);
    first = last + 1;
  }
  return text;
}

}  // namespace gradsync
