#include "tools/gradsyncctl/quantity.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

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
  return FormatLowestRanks(ranks, ranks.size(), ranks.size());
}

std::string FormatLowestRanks(const std::vector<std::uint32_t>& ranks, std::size_t total,
                              std::size_t most_ranges) {
  if (ranks.empty()) return "-";
  std::vector<std::string> parts;
  std::size_t named = 0;
  while (named < ranks.size() && parts.size() < most_ranges) {
    const std::size_t first = named++;
    while (named < ranks.size() && ranks[named] == ranks[named - 1] + 1) ++named;
    parts.push_back(absl::StrCat(ranks[first]));
    if (named - first > 1) absl::StrAppend(&parts.back(), "-", ranks[named - 1]);
  }
  if (named < total) parts.push_back(absl::StrCat(total - named, " more"));
  return absl::StrJoin(parts, ", ");
}

}  // namespace gradsync
