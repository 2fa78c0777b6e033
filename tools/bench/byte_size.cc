#include "tools/bench/byte_size.h"

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gradsync::bench {
namespace {

constexpr absl::string_view kUnits = "KMG";

bool AllDigits(absl::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos;
}

}  // namespace

std::optional<std::uint64_t> ParseByteSize(absl::string_view text) {
  int shift = 0;
  if (!text.empty()) {
    const std::size_t unit = kUnits.find(text.back());
    if (unit != absl::string_view::npos) {
      shift = 10 * (static_cast<int>(unit) + 1);
      text.remove_suffix(1);
    }
  }
  std::uint64_t number = 0;
  if (!AllDigits(text) || !absl::SimpleAtoi(text, &number)) return std::nullopt;
  if (number > std::numeric_limits<std::uint64_t>::max() >> shift) return std::nullopt;
  return number << shift;
}

std::string FormatByteSize(std::uint64_t bytes) {
  std::string unit;
  for (const char next : kUnits) {
    if (bytes == 0 || bytes % 1024 != 0) break;
    bytes /= 1024;
    unit = next;
  }
  return absl::StrCat(bytes, unit);
}

}  // namespace gradsync::bench
