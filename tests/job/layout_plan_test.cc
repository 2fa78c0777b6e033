#include "daemon/job/layout_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kManyBuckets = 4096;

LayoutSpec Spec(std::vector<Parameter> parameters, std::uint64_t first_cap = 1u << 20,
                std::uint64_t cap = 25u << 20) {
  LayoutSpec spec;
  spec.name = "model";
  spec.parameters = std::move(parameters);
  spec.first_bucket_cap_bytes = first_cap;
  spec.bucket_cap_bytes = cap;
  return spec;
}

Parameter Float32(std::uint64_t elements) { return {"p", {elements}, DataType::kFloat32}; }

LayoutPlan Plan(const LayoutSpec& spec) {
  auto plan = PlanLayout(spec, kManyBuckets);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : LayoutPlan{};
}

// The bucket of each parameter, in the order of registration.
std::vector<std::uint32_t> BucketsOf(const LayoutSpec& spec) {
  std::vector<std::uint32_t> buckets;
  for (const PlannedParameter& placement : Plan(spec).placements) {
    buckets.push_back(placement.bucket);
  }
  return buckets;
}

using Buckets = std::vector<std::uint32_t>;

TEST(LayoutPlanTest, ParametersFillBucketsInReverseOrderOfRegistration) {
  // 40 bytes each, two to a bucket: {4, 3}, {2, 1}, {0}.
  const LayoutSpec spec = Spec({Float32(10), Float32(10), Float32(10), Float32(10), Float32(10)},
                               /*first_cap=*/80, /*cap=*/80);
  EXPECT_EQ(BucketsOf(spec), (Buckets{2, 1, 1, 0, 0}));
}

TEST(LayoutPlanTest, BucketStartsWithTheParameterThatIsReadyFirst) {
  const LayoutPlan plan = Plan(Spec({Float32(10), Float32(10)}));
  EXPECT_EQ(plan.placements[1].offset, 0u);
  EXPECT_EQ(plan.placements[0].offset, kParameterAlignment);
}

TEST(LayoutPlanTest, FirstBucketIsSmaller) {
  const LayoutSpec spec = Spec({Float32(10), Float32(10), Float32(10), Float32(10), Float32(10)},
                               /*first_cap=*/40, /*cap=*/1000);
  EXPECT_EQ(BucketsOf(spec), (Buckets{1, 1, 1, 1, 0}));
}

TEST(LayoutPlanTest, CapIsFilledExactly) {
  EXPECT_EQ(BucketsOf(Spec({Float32(10), Float32(10)}, 80, 80)), (Buckets{0, 0}));
  EXPECT_EQ(BucketsOf(Spec({Float32(10), Float32(10)}, 79, 80)), (Buckets{1, 0}));
}

TEST(LayoutPlanTest, ParameterLargerThanTheCapGetsItsOwnBucket) {
  const LayoutSpec spec = Spec({Float32(1), Float32(100), Float32(1)}, /*first_cap=*/40,
                               /*cap=*/40);
  EXPECT_EQ(BucketsOf(spec), (Buckets{2, 1, 0}));
  EXPECT_EQ(Plan(spec).buckets[1].count, 100u);
}

TEST(LayoutPlanTest, LargeFirstParameterDoesNotDelayTheNextBucket) {
  EXPECT_EQ(BucketsOf(Spec({Float32(1), Float32(1), Float32(100)}, 40, 40)), (Buckets{1, 1, 0}));
}

TEST(LayoutPlanTest, BucketHasOneType) {
  LayoutSpec spec = Spec({{"a", {2}, DataType::kFloat32},
                          {"b", {2}, DataType::kBfloat16},
                          {"c", {2}, DataType::kFloat32},
                          {"d", {2}, DataType::kBfloat16}});
  const LayoutPlan plan = Plan(spec);
  ASSERT_EQ(plan.buckets.size(), 2u);
  // Buckets are numbered by the parameter that backward finishes first.
  EXPECT_EQ(BucketsOf(spec), (Buckets{1, 0, 1, 0}));
  EXPECT_EQ(plan.buckets[0].dtype, DataType::kBfloat16);
  EXPECT_EQ(plan.buckets[1].dtype, DataType::kFloat32);
}

TEST(LayoutPlanTest, EachTypeHasASmallFirstBucket) {
  LayoutSpec spec = Spec({}, /*first_cap=*/8, /*cap=*/1000);
  for (int i = 0; i < 4; ++i) {
    spec.parameters.push_back({absl::StrCat("f", i), {2}, DataType::kFloat32});
    spec.parameters.push_back({absl::StrCat("h", i), {4}, DataType::kFloat16});
  }
  // From the back: h3 | f3 | (h2 h1 h0) | (f2 f1 f0). Full buckets close before the others.
  EXPECT_EQ(BucketsOf(spec), (Buckets{3, 2, 3, 2, 3, 2, 1, 0}));
}

TEST(LayoutPlanTest, BucketsAreNumberedInTheOrderTheyFill) {
  // Backward finishes d1 first and d0 last. They share a bucket; the float32 bucket between them is
  // full earlier.
  LayoutSpec spec = Spec({{"d0", {1}, DataType::kFloat64},
                          {"f0", {1}, DataType::kFloat32},
                          {"f1", {10}, DataType::kFloat32},
                          {"d1", {1}, DataType::kFloat64}},
                         /*first_cap=*/40, /*cap=*/40);
  EXPECT_EQ(BucketsOf(spec), (Buckets{1, 2, 0, 1}));
}

// `count` parameters of 40 bytes; the first bucket holds one of them.
LayoutSpec WithLastCap(std::size_t count, std::uint64_t last_cap) {
  LayoutSpec spec = Spec(std::vector<Parameter>(count, Float32(10)), /*first_cap=*/40,
                         /*cap=*/1000);
  spec.last_bucket_cap_bytes = last_cap;
  return spec;
}

TEST(LayoutPlanTest, LastBucketIsSplitAtItsCap) {
  EXPECT_EQ(BucketsOf(WithLastCap(5, 0)), (Buckets{1, 1, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(5, 40)), (Buckets{2, 1, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(5, 79)), (Buckets{2, 1, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(5, 80)), (Buckets{2, 2, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(5, 159)), (Buckets{2, 2, 2, 1, 0}));
}

TEST(LayoutPlanTest, LastBucketWithinItsCapIsNotSplit) {
  EXPECT_EQ(BucketsOf(WithLastCap(5, 160)), (Buckets{1, 1, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(5, 1u << 20)), (Buckets{1, 1, 1, 1, 0}));
  EXPECT_EQ(BucketsOf(WithLastCap(0, 1)), Buckets{});
}

TEST(LayoutPlanTest, LastBucketHoldsAtLeastOneParameter) {
  EXPECT_EQ(BucketsOf(WithLastCap(5, 1)), (Buckets{2, 1, 1, 1, 0}));
  // The parameter already has its own bucket.
  LayoutSpec alone = Spec({Float32(100), Float32(1)}, 40, 40);
  alone.last_bucket_cap_bytes = 40;
  EXPECT_EQ(BucketsOf(alone), (Buckets{1, 0}));
  // The last parameter is larger than the cap. The parameters before it get a bucket without it.
  LayoutSpec large = Spec({Float32(100), Float32(1), Float32(1)});
  large.last_bucket_cap_bytes = 40;
  EXPECT_EQ(BucketsOf(large), (Buckets{1, 0, 0}));
}

TEST(LayoutPlanTest, OnlyBucketIsSplitToo) {
  LayoutSpec spec = Spec({Float32(10), Float32(10), Float32(10)});
  spec.last_bucket_cap_bytes = 40;
  EXPECT_EQ(BucketsOf(spec), (Buckets{1, 0, 0}));
  const LayoutPlan plan = Plan(spec);
  // The order within the buckets does not change.
  EXPECT_EQ(plan.placements[2].offset, 0u);
  EXPECT_EQ(plan.placements[1].offset, kParameterAlignment);
  EXPECT_EQ(plan.placements[0].offset, plan.buckets[1].offset);
  EXPECT_EQ(plan.buckets[0].count, kParameterAlignment / 4 + 10);
  EXPECT_EQ(plan.buckets[1].count, 10u);
}

TEST(LayoutPlanTest, EmptyBucketIsNeverSplitOff) {
  LayoutSpec spec = Spec({Float32(10), {"empty", {0}, DataType::kFloat32}});
  spec.last_bucket_cap_bytes = 8;
  EXPECT_EQ(BucketsOf(spec), (Buckets{0, 0}));
  // An empty parameter adds no bytes, so it always fits into the bucket that is split off.
  spec.parameters.insert(spec.parameters.begin(), {"scalar", {}, DataType::kFloat32});
  spec.parameters.insert(spec.parameters.begin(), {"empty", {0}, DataType::kFloat32});
  EXPECT_EQ(BucketsOf(spec), (Buckets{1, 1, 0, 0}));
}

TEST(LayoutPlanTest, BucketThatIsReadyLastIsSplitWhateverItsType) {
  // The bucket's first parameter is done before the float32 ones, so the bucket has a lower number.
  LayoutSpec spec = Spec({{"d0", {2}, DataType::kFloat64},
                          {"d1", {2}, DataType::kFloat64},
                          {"f0", {10}, DataType::kFloat32},
                          {"f1", {10}, DataType::kFloat32},
                          {"d2", {2}, DataType::kFloat64}});
  EXPECT_EQ(BucketsOf(spec), (Buckets{0, 0, 1, 1, 0}));
  spec.last_bucket_cap_bytes = 32;
  EXPECT_EQ(BucketsOf(spec), (Buckets{2, 2, 1, 1, 0}));
  const LayoutPlan plan = Plan(spec);
  EXPECT_EQ(plan.buckets[0].dtype, DataType::kFloat64);
  EXPECT_EQ(plan.buckets[1].dtype, DataType::kFloat32);
  EXPECT_EQ(plan.buckets[2].dtype, DataType::kFloat64);
  EXPECT_EQ(plan.placements[1].offset, plan.buckets[2].offset);
  EXPECT_EQ(plan.placements[0].offset, plan.buckets[2].offset + kParameterAlignment);
}

TEST(LayoutPlanTest, BucketThatIsSplitOffCountsForTheQuota) {
  EXPECT_TRUE(PlanLayout(WithLastCap(5, 0), 2).ok());
  EXPECT_TRUE(PlanLayout(WithLastCap(5, 40), 3).ok());
  EXPECT_EQ(DetailsOf(PlanLayout(WithLastCap(5, 40), 2).status()).reason, "QUOTA");
}

TEST(LayoutPlanTest, EverythingIsAlignedAndNothingOverlaps) {
  LayoutSpec spec = Spec({}, /*first_cap=*/64, /*cap=*/300);
  const DataType types[] = {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16,
                            DataType::kBfloat16};
  for (std::uint64_t i = 0; i < 40; ++i) {
    spec.parameters.push_back({absl::StrCat("p", i), {1 + i * 7 % 23, 1 + i % 3}, types[i % 4]});
  }
  const LayoutPlan plan = Plan(spec);
  std::uint64_t end = 0;
  for (const PlannedBucket& bucket : plan.buckets) {
    EXPECT_EQ(bucket.offset % kBucketAlignment, 0u);
    EXPECT_GE(bucket.offset, end);
    end = bucket.offset + bucket.count * ItemSize(bucket.dtype);
  }
  EXPECT_LE(end, plan.arena_bytes);
  EXPECT_EQ(plan.arena_bytes % 4096, 0u);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    const Parameter& parameter = spec.parameters[i];
    const PlannedParameter& placement = plan.placements[i];
    const PlannedBucket& bucket = plan.buckets[placement.bucket];
    const std::uint64_t bytes = parameter.shape[0] * parameter.shape[1] * ItemSize(parameter.dtype);
    EXPECT_EQ(bucket.dtype, parameter.dtype);
    EXPECT_EQ(placement.offset % kParameterAlignment, 0u);
    EXPECT_GE(placement.offset, bucket.offset);
    EXPECT_LE(placement.offset + bytes, bucket.offset + bucket.count * ItemSize(bucket.dtype));
    for (const auto& [begin, stop] : spans) {
      EXPECT_TRUE(placement.offset + bytes <= begin || stop <= placement.offset);
    }
    spans.emplace_back(placement.offset, placement.offset + bytes);
  }
}

TEST(LayoutPlanTest, PaddingCountsForTheBucketButNotForTheCap) {
  // Three elements take 12 bytes and are 64 apart.
  const LayoutSpec spec = Spec({Float32(3), Float32(3)}, /*first_cap=*/24, /*cap=*/24);
  const LayoutPlan plan = Plan(spec);
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_EQ(plan.buckets[0].count, kParameterAlignment / 4 + 3);
}

TEST(LayoutPlanTest, ScalarsAndEmptyParametersGetAnOffset) {
  const LayoutPlan plan =
      Plan(Spec({{"empty", {0, 7}, DataType::kFloat32}, {"scalar", {}, DataType::kFloat32}}));
  ASSERT_EQ(plan.buckets.size(), 1u);
  EXPECT_EQ(plan.placements[1].offset, 0u);
  EXPECT_EQ(plan.arena_bytes, 4096u);
}

TEST(LayoutPlanTest, ExplicitBucketsAreKept) {
  LayoutSpec spec = Spec({});
  spec.explicit_buckets = {
      {DataType::kFloat32, 5}, {DataType::kFloat16, 3}, {DataType::kFloat64, 1000}};
  const LayoutPlan plan = Plan(spec);
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_TRUE(plan.placements.empty());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.buckets[i].dtype, spec.explicit_buckets[i].first);
    EXPECT_EQ(plan.buckets[i].count, spec.explicit_buckets[i].second);
  }
  EXPECT_EQ(plan.buckets[1].offset, kBucketAlignment);
  EXPECT_EQ(plan.buckets[2].offset, 2 * kBucketAlignment);
  EXPECT_EQ(plan.arena_bytes, 12288u);
}

TEST(LayoutPlanTest, TooManyBucketsErrorNamesBothNumbersAndTheRemedy) {
  const LayoutSpec spec = Spec({Float32(10), Float32(10), Float32(10)}, 1, 1);
  EXPECT_TRUE(PlanLayout(spec, 3).ok());
  const absl::Status status = PlanLayout(spec, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(status).reason, "QUOTA");
  for (const char* part : {"'model'", "3 buckets", "2", "quota_buckets_per_layout"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << part << " in: " << status;
  }
}

// Every way in which two ranks' layouts can differ, and the error's text.
struct Difference {
  const char* name;
  void (*change)(LayoutSpec*);
  std::vector<const char*> says;
};

LayoutSpec Reference() {
  LayoutSpec spec =
      Spec({{"fc.weight", {10, 64}, DataType::kFloat32}, {"fc.bias", {10}, DataType::kFloat32}});
  return spec;
}

class LayoutDifferenceTest : public testing::TestWithParam<Difference> {};

TEST_P(LayoutDifferenceTest, NamesBothRanksAndChangesTheFingerprint) {
  LayoutSpec other = Reference();
  GetParam().change(&other);
  const std::string difference = FirstDifference(Reference(), 3, other, 5);
  for (const char* part : GetParam().says) {
    EXPECT_TRUE(absl::StrContains(difference, part)) << part << " in: " << difference;
  }
  EXPECT_TRUE(absl::StrContains(difference, "on rank 3")) << difference;
  EXPECT_TRUE(absl::StrContains(difference, "on rank 5")) << difference;
  EXPECT_NE(Plan(other).fingerprint, Plan(Reference()).fingerprint);
}

const Difference kDifferences[] = {
    {"Shape",
     [](LayoutSpec* spec) { spec->parameters[0].shape[1] = 32; },
     {"parameter 0", "'fc.weight' float32 [10,64] on rank 3", "[10,32] on rank 5"}},
    {"Rank",
     [](LayoutSpec* spec) {
       spec->parameters[1].shape = {10, 1};
     },
     {"parameter 1", "[10] on rank 3", "[10,1] on rank 5"}},
    {"Type",
     [](LayoutSpec* spec) { spec->parameters[1].dtype = DataType::kBfloat16; },
     {"parameter 1", "'fc.bias' float32", "'fc.bias' bfloat16"}},
    {"Name",
     [](LayoutSpec* spec) { spec->parameters[1].name = "head.bias"; },
     {"parameter 1", "'fc.bias'", "'head.bias'"}},
    {"Order",
     [](LayoutSpec* spec) { std::swap(spec->parameters[0], spec->parameters[1]); },
     {"parameter 0", "'fc.weight'", "'fc.bias'"}},
    {"OneMore",
     [](LayoutSpec* spec) {
       spec->parameters.push_back({"extra", {1}, DataType::kFloat64});
     },
     {"parameter 2", "none on rank 3", "'extra' float64 [1] on rank 5"}},
    {"OneLess",
     [](LayoutSpec* spec) { spec->parameters.pop_back(); },
     {"parameter 1", "'fc.bias' float32 [10] on rank 3", "none on rank 5"}},
    {"Cap",
     [](LayoutSpec* spec) { spec->bucket_cap_bytes = 7; },
     {"bucket_cap_bytes", "26214400", "7"}},
    {"FirstCap",
     [](LayoutSpec* spec) { spec->first_bucket_cap_bytes = 7; },
     {"first_bucket_cap_bytes", "1048576", "7"}},
    {"LastCap",
     [](LayoutSpec* spec) { spec->last_bucket_cap_bytes = 7; },
     {"last_bucket_cap_bytes", "0 on rank 3", "7 on rank 5"}},
    {"Operation",
     [](LayoutSpec* spec) { spec->op = ReduceOp::kSum; },
     {"reduce op", "average on rank 3", "sum on rank 5"}},
    {"OrderFreeOperation",
     [](LayoutSpec* spec) { spec->op = ReduceOp::kMin; },
     {"reduce op", "average on rank 3", "min on rank 5"}},
    {"Explicit",
     [](LayoutSpec* spec) {
       spec->explicit_buckets = {{DataType::kFloat32, 1}};
     },
     {"number of explicit buckets", "0 on rank 3", "1 on rank 5"}},
};

INSTANTIATE_TEST_SUITE_P(Layouts, LayoutDifferenceTest, testing::ValuesIn(kDifferences),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(FirstDifferenceTest, NamesTheFirstOfSeveral) {
  LayoutSpec other = Reference();
  other.parameters[1].shape = {9};
  other.parameters[0].shape = {9, 64};
  other.op = ReduceOp::kSum;
  EXPECT_TRUE(absl::StrContains(FirstDifference(Reference(), 0, other, 1), "parameter 0"));
}

TEST(FirstDifferenceTest, NamesTheFirstExplicitBucketThatDiffers) {
  LayoutSpec a = Spec({});
  a.explicit_buckets = {{DataType::kFloat32, 5}, {DataType::kFloat16, 3}};
  LayoutSpec b = a;
  b.explicit_buckets[1].second = 4;
  const std::string difference = FirstDifference(a, 0, b, 1);
  for (const char* part : {"bucket 1", "float16 x 3 on rank 0", "float16 x 4 on rank 1"}) {
    EXPECT_TRUE(absl::StrContains(difference, part)) << part << " in: " << difference;
  }
}

TEST(FirstDifferenceTest, EqualLayoutsHaveNone) {
  EXPECT_EQ(FirstDifference(Reference(), 0, Reference(), 1), "");
  EXPECT_EQ(Plan(Reference()).fingerprint, Plan(Reference()).fingerprint);
}

// ---- Buffers

TEST(LayoutPlanTest, BuffersAreOneMoreBucketAtTheEnd) {
  LayoutSpec spec = Spec({Float32(10)});
  const LayoutPlan without = Plan(spec);
  spec.buffer_bytes = 5000;
  const LayoutPlan plan = Plan(spec);
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.buckets[0].count, without.buckets[0].count);
  EXPECT_EQ(plan.buckets[1].dtype, DataType::kUint8);
  EXPECT_EQ(plan.buckets[1].count, 5000u);
  EXPECT_EQ(plan.buckets[1].offset, kBucketAlignment);
  EXPECT_EQ(plan.arena_bytes, 2u * 4096);
  EXPECT_NE(plan.fingerprint, without.fingerprint);
  EXPECT_EQ(spec.BufferBucket(plan.buckets.size()), 1u);
  spec.buffer_bytes = 0;
  EXPECT_EQ(spec.BufferBucket(without.buckets.size()), std::nullopt);
}

TEST(LayoutPlanTest, BuffersCountAsABucket) {
  LayoutSpec spec = Spec({Float32(10)});
  spec.buffer_bytes = 1;
  EXPECT_TRUE(PlanLayout(spec, 2).ok());
  EXPECT_FALSE(PlanLayout(spec, 1).ok());
}

TEST(FirstDifferenceTest, NamesTheBytesOfBuffers) {
  LayoutSpec a = Spec({Float32(10)}), b = a;
  a.buffer_bytes = 4;
  EXPECT_EQ(FirstDifference(a, 0, b, 1), "buffer_bytes: 4 on rank 0, 0 on rank 1");
}

}  // namespace
}  // namespace gradsync::daemon
