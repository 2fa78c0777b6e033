#include "tests/engine/engine_bucket.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace gradsync::daemon {
namespace {

std::uint64_t Mix(std::uint64_t value) {
  value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCDull;
  value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return value ^ (value >> 33);
}

// Rounds to the nearest value with this number of stored mantissa bits; ties to even.
double Nearest(double value, int mantissa_bits, int min_exponent, double largest) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), min_exponent);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, mantissa_bits - exponent)),
                                    exponent - mantissa_bits);
  if (std::fabs(rounded) <= largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

}  // namespace

double Rounded(DataType dtype, double value) {
  switch (dtype) {
    case DataType::kFloat16:
      return Nearest(value, 10, -14, 65504);
    case DataType::kBfloat16:
      return Nearest(value, 7, -126, 0x1.FEp127);
    case DataType::kFloat32:
      return static_cast<double>(static_cast<float>(value));
    default:
      return value;
  }
}

double TestValue(std::uint32_t node, std::size_t i, bool short_mantissa) {
  const std::uint64_t bits = Mix(i * 31 + node + 1);
  const int exponent = static_cast<int>(bits % 16) - 8;
  const auto mantissa = static_cast<double>((bits >> 8) & 0x3FFFFFFF) / (1 << 30);
  const double value = std::ldexp(1.0 + mantissa, exponent) * ((bits >> 40) % 2 == 0 ? 1 : -1);
  return short_mantissa ? Rounded(DataType::kBfloat16, value) : value;
}

EngineBucket::EngineBucket(DataType dtype, std::size_t count, std::uint32_t node)
    : item_bytes_(ItemSize(WorkType(dtype))),
      mine_(count * item_bytes_),
      result_(count * item_bytes_),
      written_(count),
      done_(new Event) {
  for (std::size_t i = 0; i < count; ++i) {
    const double value = TestValue(node, i, ItemSize(dtype) == 2);
    const auto single = static_cast<float>(value);
    if (item_bytes_ == 4) {
      std::memcpy(mine_.data() + 4 * i, &single, 4);
    } else {
      std::memcpy(mine_.data() + 8 * i, &value, 8);
    }
  }
  exchange_.dtype = dtype;
  exchange_.count = count;
  exchange_.gather = [this](std::size_t first, std::size_t n, std::byte* sum) {
    std::memcpy(sum, mine_.data() + first * item_bytes_, n * item_bytes_);
  };
  exchange_.scatter = [this](std::size_t first, std::size_t n, const std::byte* sum) {
    std::memcpy(result_.data() + first * item_bytes_, sum, n * item_bytes_);
    for (std::size_t i = 0; i < n; ++i) ++written_[first + i];
  };
  exchange_.done = [this](const absl::Status& status) { done_->Set(status); };
}

void EngineBucket::Reset() {
  std::fill(result_.begin(), result_.end(), std::byte{});
  std::fill(written_.begin(), written_.end(), std::uint8_t{0});
  done_ = std::make_unique<Event>();
}

double EngineBucket::ResultAt(std::size_t i) const {
  float single = 0;
  double value = 0;
  if (item_bytes_ == 4) {
    std::memcpy(&single, result_.data() + 4 * i, 4);
    return static_cast<double>(single);
  }
  std::memcpy(&value, result_.data() + 8 * i, 8);
  return value;
}

std::size_t EngineBucket::Unwritten() const {
  return written_.size() -
         static_cast<std::size_t>(std::count(written_.begin(), written_.end(), std::uint8_t{1}));
}

double ExpectedSum(DataType dtype, DataType wire, std::uint32_t nodes, std::size_t i) {
  const bool sixteen = ItemSize(dtype) == 2;
  const DataType work = WorkType(dtype);
  double sum = 0;
  for (std::uint32_t node = 0; node < nodes; ++node) {
    const double addend = Rounded(wire, Rounded(work, TestValue(node, i, sixteen)));
    sum = node == 0 ? addend : Rounded(work, sum + addend);
  }
  return Rounded(wire, sum);
}

}  // namespace gradsync::daemon
