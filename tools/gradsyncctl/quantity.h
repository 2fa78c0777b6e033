// Numbers as people read them: three digits, with the unit that fits.

#ifndef TOOLS_GRADSYNCCTL_QUANTITY_H_
#define TOOLS_GRADSYNCCTL_QUANTITY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gradsync {

// "312 us", "4.21 ms", "1.50 s", "12.3 min".
std::string FormatMicroseconds(double us);
// Whole seconds in at most two units: "42 s", "13 min 5 s", "2 h 13 min", "5 d 2 h".
std::string FormatUptime(double seconds);
// "512 B", "101.3 KiB", "25.0 MiB".
std::string FormatBytes(std::uint64_t bytes);
// "0-2, 7"; "-" if there are none. Ascending order is expected.
std::string FormatRanks(const std::vector<std::uint32_t>& ranks);
// The same for the lowest of `total` ranks, with at most `most_ranges` ranges: "0-2, 7, 40 more".
std::string FormatLowestRanks(const std::vector<std::uint32_t>& ranks, std::size_t total,
                              std::size_t most_ranges);

}  // namespace gradsync

#endif  // TOOLS_GRADSYNCCTL_QUANTITY_H_
