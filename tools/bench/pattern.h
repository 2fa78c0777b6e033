// The data that the ranks reduce. Its average is exact in every type and in any order of addition,
// so every wrong element shows.

#ifndef TOOLS_BENCH_PATTERN_H_
#define TOOLS_BENCH_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/gradsync/data_type.h"

namespace gradsync::bench {

// Beyond it, sums of the pattern would not be exact in bfloat16.
inline constexpr std::uint32_t kMaxRanks = 8;

// Small multiples of `ranks`, in a sequence that differs from rank to rank, repeats with a prime
// period and shifts from iteration to iteration: data of a wrong rank, place or iteration differs.
// Thread-safe.
class Pattern {
 public:
  // 1 <= ranks <= kMaxRanks.
  Pattern(DataType dtype, std::uint32_t ranks);

  // Writes a rank's own `count` elements.
  void Fill(std::uint32_t rank, std::uint64_t iteration, std::byte* data, std::size_t count) const;
  // Counts elements that differ from the average. Checks all of them, or the first, the last and
  // about one in 32.
  std::uint64_t CountWrong(std::uint64_t iteration, const std::byte* data, std::size_t count,
                           bool all) const;

 private:
  using Table = std::vector<std::byte>;

  // Constant after construction.
  const std::size_t item_size_;
  std::vector<Table> ranks_;  // two periods each, so that any shift is contiguous
  Table average_;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_PATTERN_H_
