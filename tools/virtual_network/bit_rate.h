// Rates of links as tc(8) spells them: 1gbit, 100mbit.

#ifndef TOOLS_VIRTUAL_NETWORK_BIT_RATE_H_
#define TOOLS_VIRTUAL_NETWORK_BIT_RATE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace gradsync {

// Bits per second of "1gbit", "100mbit", "64kbit", "9600bit" (powers of ten, whole numbers from 1);
// nullopt for anything else, or beyond 64 bits.
std::optional<std::uint64_t> ParseBitRate(absl::string_view text);

// The shortest text with this rate.
std::string FormatBitRate(std::uint64_t bits_per_second);

}  // namespace gradsync

#endif  // TOOLS_VIRTUAL_NETWORK_BIT_RATE_H_
