// Sizes as people write them: 64K, 25M, 1G are powers of two, as in nccl-tests.

#ifndef TOOLS_BENCH_BYTE_SIZE_H_
#define TOOLS_BENCH_BYTE_SIZE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace gradsync::bench {

// "65536", "64K", "25M", "1G"; nullopt for anything else, or beyond 64 bits.
std::optional<std::uint64_t> ParseByteSize(absl::string_view text);

// The shortest such text: "64K", "1536K", "100".
std::string FormatByteSize(std::uint64_t bytes);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_BYTE_SIZE_H_
