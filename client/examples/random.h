// Random numbers that are the same on every machine, unlike those of <random>'s distributions.

#ifndef CLIENT_EXAMPLES_RANDOM_H_
#define CLIENT_EXAMPLES_RANDOM_H_

#include <cstdint>

namespace gradsync::examples {

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In -1..1. 24 random bits: every value is exact in float32.
  float NextSymmetric() { return static_cast<float>(Next() >> 40) * (1.0f / (1 << 23)) - 1.0f; }

  // In 0..bound-1. The bias of the remainder is below bound / 2^64.
  std::uint64_t NextBelow(std::uint64_t bound) { return Next() % bound; }

 private:
  std::uint64_t state_;
};

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_RANDOM_H_
