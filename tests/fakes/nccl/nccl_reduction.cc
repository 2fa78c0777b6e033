#include "tests/fakes/nccl/nccl_reduction.h"

#include <algorithm>
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
  static float Widen(Stored value) { return static_cast<float>(Float16Value(value)); }
  static Stored Narrow(float value) { return NearestFloat16(value); }
};
struct Brain {
  using Stored = std::uint16_t;
  static float Widen(Stored value) { return static_cast<float>(Bfloat16Value(value)); }
  static Stored Narrow(float value) { return NearestBfloat16(value); }
};

template <typename Type>
void Reduce(ncclRedOp_t operation, const std::vector<const void*>& contributions, std::size_t count,
            void* result) {
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
      sum = Type::Narrow(operation == ncclSum   ? one + other
                         : operation == ncclMax ? std::max(one, other)
                                                : std::min(one, other));
    }
    static_cast<Stored*>(result)[i] = sum;
  }
}

}  // namespace

std::size_t NcclTypeBytes(ncclDataType_t type) {
  switch (type) {
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

bool HasNcclOperation(ncclRedOp_t operation) {
  return operation == ncclSum || operation == ncclMax || operation == ncclMin;
}

void NcclReduce(ncclDataType_t type, ncclRedOp_t operation,
                const std::vector<const void*>& contributions, std::size_t count, void* result) {
  switch (type) {
    case ncclUint8:
      return Reduce<Plain<std::uint8_t>>(operation, contributions, count, result);
    case ncclInt32:
      return Reduce<Plain<std::int32_t>>(operation, contributions, count, result);
    case ncclInt64:
      return Reduce<Plain<std::int64_t>>(operation, contributions, count, result);
    case ncclFloat32:
      return Reduce<Plain<float>>(operation, contributions, count, result);
    case ncclFloat64:
      return Reduce<Plain<double>>(operation, contributions, count, result);
    case ncclFloat16:
      return Reduce<Half>(operation, contributions, count, result);
    default:
      return Reduce<Brain>(operation, contributions, count, result);
  }
}

}  // namespace gradsync::fakes
