#include "daemon/reduce/gpu_staging.h"

#include <gtest/gtest.h>

#include <vector>

namespace gradsync::daemon {
namespace {

constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16,
                               DataType::kBfloat16};

TEST(GpuStaging, FollowsTheWireType) {
  const auto types = [](NcclWireType wire_type) {
    std::vector<DataType> staging;
    for (const DataType dtype : kTypes) staging.push_back(StagingType(dtype, wire_type));
    return staging;
  };
  const DataType f32 = DataType::kFloat32, f64 = DataType::kFloat64;
  const DataType f16 = DataType::kFloat16, bf16 = DataType::kBfloat16;
  using Types = std::vector<DataType>;
  EXPECT_EQ(types(NcclWireType::kAuto), (Types{f32, f64, f32, f32}));
  EXPECT_EQ(types(NcclWireType::kSame), (Types{f32, f64, f16, bf16}));
  EXPECT_EQ(types(NcclWireType::kBfloat16), (Types{bf16, f64, f16, bf16}));
  EXPECT_EQ(types(NcclWireType::kFloat16), (Types{f16, f64, f16, bf16}));
}

TEST(GpuStaging, DefaultIsTheLargestType) {
  for (const NcclWireType wire_type :
       {NcclWireType::kSame, NcclWireType::kBfloat16, NcclWireType::kFloat16}) {
    for (const DataType dtype : kTypes) {
      EXPECT_LE(StagingBytes(StagingType(dtype, wire_type), 7),
                StagingBytes(StagingType(dtype, NcclWireType::kAuto), 7));
    }
  }
  EXPECT_EQ(StagingBytes(DataType::kBfloat16, 7), 16u);
}

TEST(GpuStaging, MatchesTheKernelsThatExist) {
  int pairs = 0;
  for (const DataType dtype : kTypes) {
    for (const DataType staging : kTypes) pairs += CanBeStagedAs(dtype, staging) ? 1 : 0;
    for (const NcclWireType wire_type : {NcclWireType::kAuto, NcclWireType::kSame,
                                         NcclWireType::kBfloat16, NcclWireType::kFloat16}) {
      EXPECT_TRUE(CanBeStagedAs(dtype, StagingType(dtype, wire_type)));
    }
    EXPECT_FALSE(CanBeStagedAs(dtype, DataType::kUnspecified));
    EXPECT_FALSE(CanBeStagedAs(DataType::kUnspecified, dtype));
  }
  EXPECT_EQ(pairs, 8);
  EXPECT_FALSE(CanBeStagedAs(DataType::kUnspecified, DataType::kUnspecified));
  EXPECT_FALSE(CanBeStagedAs(DataType::kFloat64, DataType::kFloat32));
  EXPECT_FALSE(CanBeStagedAs(DataType::kFloat16, DataType::kBfloat16));
}

}  // namespace
}  // namespace gradsync::daemon
