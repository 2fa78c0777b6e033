// How a GPU holds a bucket's sum between combine and write-back, and sums it with other GPUs.

#ifndef DAEMON_REDUCE_GPU_STAGING_H_
#define DAEMON_REDUCE_GPU_STAGING_H_

#include <cstddef>

#include "proto/gradsync/data_type.h"
#include "proto/gradsync/nccl_settings.h"

namespace gradsync::daemon {

// True if there are kernels for this pair of types: equal types, or float32 and a 16-bit type.
// Whatever the staging type is, kernels add up the gradients of the GPU's own trainers, and scale
// the sum, in float32 (in float64 for float64 buckets).
constexpr bool CanBeStagedAs(DataType dtype, DataType staging) {
  if (IsInteger(dtype) || IsInteger(staging)) return false;
  if (staging == dtype) return ItemSize(dtype) > 0;
  return (dtype == DataType::kFloat32 && ItemSize(staging) == 2) ||
         (ItemSize(dtype) == 2 && staging == DataType::kFloat32);
}

// The staging type of a bucket in a job with several GPUs. No wire type gives a larger type than
// kAuto.
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

// Bytes for `count` elements and the number of void contributions behind them.
constexpr std::size_t StagingBytes(DataType staging, std::size_t count) {
  return (count + 1) * ItemSize(staging);
}

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_GPU_STAGING_H_
