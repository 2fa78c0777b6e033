// How a GPU holds a bucket's sum between combine and write-back, and sums it with other GPUs.

#ifndef DAEMON_REDUCE_GPU_STAGING_H_
#define DAEMON_REDUCE_GPU_STAGING_H_

#include <cstddef>

#include "proto/gradsync/data_type.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync {

// Whether there are kernels for it: the bucket's own type, and float32 and the 16-bit ones for each
// other. A GPU's own trainers are added up, and the sum is scaled, in float32 in any case (float64
// buckets: in float64).
constexpr bool CanBeStagedAs(DataType dtype, DataType staging) {
  if (staging == dtype) return ItemSize(dtype) > 0;
  return (dtype == DataType::kFloat32 && ItemSize(staging) == 2) ||
         (ItemSize(dtype) == 2 && staging == DataType::kFloat32);
}

// Of a bucket whose job is on several GPUs. kAuto is the one that takes the most room.
constexpr DataType StagingType(DataType dtype, NcclWireType wire_type) {
  const bool floats = dtype == DataType::kFloat32;
  switch (wire_type) {
    case NcclWireType::kAuto:
      return ItemSize(dtype) == 2 ? DataType::kFloat32 : dtype;
    case NcclWireType::kSame:
      break;
    case NcclWireType::kBfloat16:
      return floats ? DataType::kBfloat16 : dtype;
    case NcclWireType::kFloat16:
      return floats ? DataType::kFloat16 : dtype;
  }
  return dtype;
}

// Of `count` elements and the number of void contributions behind them.
constexpr std::size_t StagingBytes(DataType staging, std::size_t count) {
  return (count + 1) * ItemSize(staging);
}

}  // namespace gradsync

#endif  // DAEMON_REDUCE_GPU_STAGING_H_
