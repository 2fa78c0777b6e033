#include "tools/virtual_network/bit_rate.h"

#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace gradsync {
namespace {

// The largest unit comes first. "bit" comes last, because every unit ends with it.
constexpr std::pair<absl::string_view, std::uint64_t> kUnits[] = {
    {"gbit", 1'000'000'000}, {"mbit", 1'000'000}, {"kbit", 1'000}, {"bit", 1}};

}  // namespace

std::optional<std::uint64_t> ParseBitRate(absl::string_view text) {
  for (const auto& [unit, bits] : kUnits) {
    if (!absl::ConsumeSuffix(&text, unit)) continue;
    std::uint64_t number = 0;
    if (text.empty() || text.find_first_not_of("0123456789") != text.npos ||
        !absl::SimpleAtoi(text, &number) || number == 0 ||
        number > std::numeric_limits<std::uint64_t>::max() / bits) {
      return std::nullopt;
    }
    return number * bits;
  }
  return std::nullopt;
}

std::string FormatBitRate(std::uint64_t bits_per_second) {
  for (const auto& [unit, bits] : kUnits) {
    if (bits_per_second % bits == 0) return absl::StrCat(bits_per_second / bits, unit);
  }
  return "";  // not reached: every rate is a multiple of one bit
}

}  // namespace gradsync
