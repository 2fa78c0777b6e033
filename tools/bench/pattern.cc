#include "tools/bench/pattern.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace gradsync::bench {
namespace {

// Elements. Prime, so that no block, slice or page boundary falls on the same place of the pattern.
constexpr std::size_t kPeriod = 1021;
constexpr std::size_t kShiftPerIteration = 17;
// A sample checks one of this many periods.
constexpr std::size_t kSamplePeriods = 32;

// 0..3, without visible regularity.
std::uint32_t Small(std::uint32_t rank, std::size_t place) {
  std::uint64_t hash = (std::uint64_t{rank} << 32 | place) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return static_cast<std::uint32_t>(hash >> 62);
}

// IEEE binary16 of 0 <= value < 2048, which is exact.
std::uint16_t Binary16(std::uint32_t value) {
  if (value == 0) return 0;
  std::uint32_t exponent = 0;
  while (value >> (exponent + 1) != 0) ++exponent;
  const std::uint32_t fraction = (value - (1u << exponent)) << (10 - exponent);
  return static_cast<std::uint16_t>((exponent + 15) << 10 | fraction);
}

template <typename T>
void Put(T value, std::size_t place, std::byte* table) {
  std::memcpy(table + place * sizeof(T), &value, sizeof(T));
}

// `sum` scaled by `factor`, as an average is made: the product is a small integer, but for 7 ranks,
// whose reciprocal leaves the last bit of a float32 wrong.
void PutScaled(DataType dtype, std::uint32_t sum, double factor, std::size_t place,
               std::byte* table) {
  const float narrow = static_cast<float>(sum) * static_cast<float>(factor);
  switch (dtype) {
    case DataType::kFloat32:
      return Put(narrow, place, table);
    case DataType::kFloat64:
      return Put(static_cast<double>(sum) * factor, place, table);
    case DataType::kFloat16:
      return Put(Binary16(static_cast<std::uint32_t>(std::lround(narrow))), place, table);
    case DataType::kBfloat16: {
      const float whole = std::round(narrow);
      std::uint32_t bits;
      std::memcpy(&bits, &whole, sizeof(bits));
      return Put(static_cast<std::uint16_t>(bits >> 16), place, table);
    }
    default:
      break;
  }
}

std::size_t Shift(std::uint64_t iteration) { return iteration * kShiftPerIteration % kPeriod; }

}  // namespace

Pattern::Pattern(DataType dtype, std::uint32_t ranks)
    : item_size_(ItemSize(dtype)),
      ranks_(ranks, Table(2 * kPeriod * item_size_)),
      average_(2 * kPeriod * item_size_) {
  for (std::size_t place = 0; place < 2 * kPeriod; ++place) {
    std::uint32_t sum = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      // A multiple of `ranks`, so that the sum can be divided: at most 3 * kMaxRanks^2 = 192 then,
      // exact in bfloat16's 8 bits.
      const std::uint32_t value = Small(rank, place % kPeriod) * ranks;
      PutScaled(dtype, value, 1.0, place, ranks_[rank].data());
      sum += value;
    }
    PutScaled(dtype, sum, 1.0 / ranks, place, average_.data());
  }
}

void Pattern::Fill(std::uint32_t rank, std::uint64_t iteration, std::byte* data,
                   std::size_t count) const {
  const std::byte* const source = ranks_[rank].data() + Shift(iteration) * item_size_;
  for (std::size_t begin = 0; begin < count; begin += kPeriod) {
    const std::size_t elements = std::min(kPeriod, count - begin);
    std::memcpy(data + begin * item_size_, source, elements * item_size_);
  }
}

std::uint64_t Pattern::CountWrong(std::uint64_t iteration, const std::byte* data, std::size_t count,
                                  bool all) const {
  const std::byte* const expected = average_.data() + Shift(iteration) * item_size_;
  const std::size_t periods = (count + kPeriod - 1) / kPeriod;
  std::uint64_t wrong = 0;
  for (std::size_t period = 0; period < periods; ++period) {
    if (!all && period % kSamplePeriods != 0 && period + 1 != periods) continue;
    const std::byte* const actual = data + period * kPeriod * item_size_;
    const std::size_t elements = std::min(kPeriod, count - period * kPeriod);
    if (std::memcmp(actual, expected, elements * item_size_) == 0) continue;
    for (std::size_t i = 0; i < elements; ++i) {
      const std::size_t offset = i * item_size_;
      if (std::memcmp(actual + offset, expected + offset, item_size_) != 0) ++wrong;
    }
  }
  return wrong;
}

}  // namespace gradsync::bench
