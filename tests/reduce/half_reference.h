// Converts float16 and bfloat16 by arithmetic. The tests compare the fast conversions, which work
// on bits, with it.

#ifndef TESTS_REDUCE_HALF_REFERENCE_H_
#define TESTS_REDUCE_HALF_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace gradsync::daemon {

// A 16-bit binary floating-point format.
struct HalfFormat {
  int mantissa_bits;  // without the implicit one
  int min_exponent;   // of the smallest normal number
  int max_exponent;   // of the largest finite number
};
inline constexpr HalfFormat kFloat16Format = {10, -14, 15};
inline constexpr HalfFormat kBfloat16Format = {7, -126, 127};

inline double HalfValue(const HalfFormat& format, std::uint16_t bits) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int biased = (bits & 0x7FFF) >> format.mantissa_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (biased == format.max_exponent - format.min_exponent + 2) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (biased == 0) return sign * std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  const int exponent = biased - 1 + format.min_exponent;
  return sign * std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - format.mantissa_bits);
}

// The number nearest to `value`. Ties go to the even number, as std::nearbyint rounds by default.
inline std::uint16_t NearestHalf(const HalfFormat& format, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (format.max_exponent - format.min_exponent + 2) << format.mantissa_bits;
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>(sign | infinity | 1 << (format.mantissa_bits - 1));
  }
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  if (magnitude == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  // The value in units of the last place. Below 2^mantissa_bits it is subnormal. The exponent lies
  // directly above the mantissa, so a carry increments the exponent.
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent)));
  if (exponent > format.max_exponent) return static_cast<std::uint16_t>(sign | infinity);
  const int bits = ((exponent - format.min_exponent) << format.mantissa_bits) + units;
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

inline double Float16Value(std::uint16_t bits) { return HalfValue(kFloat16Format, bits); }
inline double Bfloat16Value(std::uint16_t bits) { return HalfValue(kBfloat16Format, bits); }
inline std::uint16_t NearestFloat16(double value) { return NearestHalf(kFloat16Format, value); }
inline std::uint16_t NearestBfloat16(double value) { return NearestHalf(kBfloat16Format, value); }

}  // namespace gradsync::daemon

#endif  // TESTS_REDUCE_HALF_REFERENCE_H_
