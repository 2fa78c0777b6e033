#include "daemon/base/tenant.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kDigits = 32;
constexpr std::size_t kGrouped = 36;

bool IsGap(std::size_t position) {
  return position == 8 || position == 13 || position == 18 || position == 23;
}

// The value of a hexadecimal digit in lower case; -1 for anything else.
int ValueOf(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return -1;
}

}  // namespace

std::optional<PodId> PodId::Parse(absl::string_view text) {
  const bool grouped = text.size() == kGrouped;
  if (!grouped && text.size() != kDigits) return std::nullopt;
  PodId pod;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (grouped && IsGap(i)) {
      if (text[i] != text[8] || (text[i] != '-' && text[i] != '_')) return std::nullopt;
      continue;
    }
    const int value = ValueOf(text[i]);
    if (value < 0) return std::nullopt;
    pod.high_ = pod.high_ << 4 | pod.low_ >> 60;
    pod.low_ = pod.low_ << 4 | static_cast<std::uint64_t>(value);
  }
  if (pod.none()) return std::nullopt;
  return pod;
}

std::string PodId::Text() const {
  if (none()) return "";
  const std::string digits =
      absl::StrCat(absl::Hex(high_, absl::kZeroPad16), absl::Hex(low_, absl::kZeroPad16));
  return absl::StrCat(digits.substr(0, 8), "-", digits.substr(8, 4), "-", digits.substr(12, 4), "-",
                      digits.substr(16, 4), "-", digits.substr(20));
}

std::string Tenant::Text() const {
  return pod.none() ? absl::StrCat(uid) : absl::StrCat(uid, " in pod ", pod.Text());
}

}  // namespace gradsync::daemon
