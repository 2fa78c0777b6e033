#include "tests/fakes/nccl/nccl_reduction.h"

#include <cstdint>

#include "tests/reduce/half_reference.h"

namespace gradsync::fakes {
namespace {

template <typename T>
struct Plain {
  using Stored = T;
  static T Widen(T value) { return value; }
  static T Narrow(T value) { return value; }
};
struct Half {
  using Stored = std::uint16_t;
  static float Widen(Stored value) { return static_cast<float>(daemon::Float16Value(value)); }
  static Stored Narrow(float value) { return daemon::NearestFloat16(value); }
};
struct Brain {
  using Stored = std::uint16_t;
  static float Widen(Stored value) { return static_cast<float>(daemon::Bfloat16Value(value)); }
  static Stored Narrow(float value) { return daemon::NearestBfloat16(value); }
};

template <typename Type>
void Sum(const std::vector<const void*>& contributions, std::size_t count, void* result) {
  using Stored = typename Type::Stored;
  const std::size_t ranks = contributions.size();
  const std::size_t chunk = (count + ranks - 1) / ranks;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t first = i / chunk + 1;
    Stored sum = static_cast<const Stored*>(contributions[first % ranks])[i];
    for (std::size_t hop = 1; hop < ranks; ++hop) {
      const auto one = Type::Widen(sum);
      const auto other =
          Type::Widen(static_cast<const Stored*>(contributions[(first + hop) % ranks])[i]);
      sum = Type::Narrow(one + other);
    }
    static_cast<Stored*>(result)[i] = sum;
  }
}

}  // namespace

std::size_t NcclTypeBytes(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclFloat32:
      return 4;
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void NcclSum(ncclDataType_t type, const std::vector<const void*>& contributions, std::size_t count,
             void* result) {
  switch (type) {
    case ncclFloat32:
      return Sum<Plain<float>>(contributions, count, result);
    case ncclFloat64:
      return Sum<Plain<double>>(contributions, count, result);
    case ncclFloat16:
      return Sum<Half>(contributions, count, result);
    default:
      return Sum<Brain>(contributions, count, result);
  }
}

}  // namespace gradsync::fakes
