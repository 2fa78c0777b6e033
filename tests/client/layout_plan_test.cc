#include "client/src/layout_plan.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/gradsync/v1/gradsync.pb.h"

namespace gradsync::client {
namespace {

using testing::HasSubstr;

LayoutSpec Valid() {
  LayoutSpec spec;
  spec.parameters = {{"w", {4, 8}, DataType::kFloat32},
                     {"b", {8}, DataType::kFloat32},
                     {"scale", {}, DataType::kBfloat16}};
  return spec;
}

// As a daemon may lay out Valid(): buckets {scale}, {b, w}.
v1::LayoutAssigned Assigned() {
  v1::LayoutAssigned assigned;
  assigned.set_arena_bytes(4096);
  v1::Bucket* bucket = assigned.add_buckets();
  bucket->set_dtype(v1::DATA_TYPE_BFLOAT16);
  bucket->set_count(1);
  bucket->set_offset(0);
  bucket = assigned.add_buckets();
  bucket->set_dtype(v1::DATA_TYPE_FLOAT32);
  bucket->set_count(16 + 32);
  bucket->set_offset(128);
  for (const auto& [index, offset] : {std::pair{1u, 192u}, {1u, 128u}, {0u, 0u}}) {
    v1::Placement* placement = assigned.add_placements();
    placement->set_bucket(index);
    placement->set_offset(offset);
  }
  return assigned;
}

template <typename Change>
void ExpectRefused(const char* what, const Change& change) {
  LayoutSpec spec = Valid();
  change(&spec);
  const absl::Status status = ValidateSpec(spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

TEST(LayoutPlanTest, MalformedSpecIsNamed) {
  EXPECT_TRUE(ValidateSpec(Valid()).ok());
  ExpectRefused("name", [](LayoutSpec* spec) { spec->name = ""; });
  ExpectRefused("name", [](LayoutSpec* spec) { spec->name = "a\tb"; });
  ExpectRefused("give parameters or explicit_buckets",
                [](LayoutSpec* spec) { spec->parameters.clear(); });
  ExpectRefused("not both", [](LayoutSpec* spec) { spec->explicit_buckets.resize(1); });
  ExpectRefused("parameter 1", [](LayoutSpec* spec) { spec->parameters[1].name = ""; });
  ExpectRefused("parameter 1", [](LayoutSpec* spec) { spec->parameters[1].name = "\xff"; });
  ExpectRefused("parameter 2 ('w')", [](LayoutSpec* spec) { spec->parameters[2].name = "w"; });
  ExpectRefused("parameter 0",
                [](LayoutSpec* spec) { spec->parameters[0].dtype = static_cast<DataType>(10); });
  ExpectRefused("parameter 0 ('w'), average of int8",
                [](LayoutSpec* spec) { spec->parameters[0].dtype = DataType::kInt8; });
  ExpectRefused("for explicit_buckets", [](LayoutSpec* spec) { spec->op = ReduceOp::kMax; });
  ExpectRefused("too large", [](LayoutSpec* spec) {
    spec->parameters[0].shape = {1ull << 33, 1ull << 33};
  });
  ExpectRefused("too large", [](LayoutSpec* spec) { spec->parameters[0].shape = {1ull << 63, 2}; });
  ExpectRefused("cap", [](LayoutSpec* spec) { spec->bucket_cap_bytes = 0; });
  ExpectRefused("op", [](LayoutSpec* spec) { spec->op = static_cast<ReduceOp>(0); });
  ExpectRefused("explicit bucket 1", [](LayoutSpec* spec) {
    spec->parameters.clear();
    spec->explicit_buckets = {{DataType::kFloat32, 4}, {DataType::kUnspecified, 4}};
  });
  const auto integers = [](LayoutSpec* spec, ReduceOp op) {
    spec->parameters.clear();
    spec->explicit_buckets = {{DataType::kInt64, 4}};
    spec->op = op;
  };
  ExpectRefused("explicit bucket 0, average of int64: integers have no average",
                [&](LayoutSpec* spec) { integers(spec, ReduceOp::kAverage); });
  ExpectRefused("not on a GPU", [&](LayoutSpec* spec) {
    integers(spec, ReduceOp::kSum);
    spec->device = "GPU-0123";
  });
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
    LayoutSpec spec = Valid();
    integers(&spec, op);
    EXPECT_TRUE(ValidateSpec(spec).ok());
  }
}

TEST(LayoutPlanTest, EmptyTensorsAreAllowed) {
  LayoutSpec spec = Valid();
  spec.parameters[0].shape = {1ull << 63, 0, 1ull << 63};
  EXPECT_TRUE(ValidateSpec(spec).ok());
}

TEST(LayoutPlanTest, FillsRegisterLayout) {
  LayoutSpec spec = Valid();
  spec.op = ReduceOp::kSum;
  spec.timeout = absl::Seconds(3);
  v1::RegisterLayout message;
  FillRegisterLayout(spec, &message);
  EXPECT_EQ(message.name(), "default");
  ASSERT_EQ(message.parameters_size(), 3);
  EXPECT_EQ(message.parameters(0).name(), "w");
  EXPECT_EQ(message.parameters(0).shape(1), 8u);
  EXPECT_EQ(message.parameters(2).shape_size(), 0);
  EXPECT_EQ(message.parameters(2).dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(message.op(), v1::REDUCE_OP_SUM);
  EXPECT_EQ(message.timeout_ms(), 3000u);
  EXPECT_EQ(message.bucket_cap_bytes(), 25u << 20);
  EXPECT_FALSE(message.bucket_done_messages());
}

TEST(LayoutPlanTest, AcceptsValidLayout) {
  const auto plan = CheckedPlan(Valid(), Assigned());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->arena_bytes, 4096u);
  ASSERT_EQ(plan->buckets.size(), 2u);
  EXPECT_EQ(plan->buckets[1].offset, 128u);
  EXPECT_EQ(plan->buckets[1].count, 48u);
  ASSERT_EQ(plan->gradients.size(), 3u);
  EXPECT_EQ(plan->gradients[0].offset, 192u);
  EXPECT_EQ(plan->gradients[0].count, 32u);
  EXPECT_EQ(plan->gradients[0].bucket, 1u);
  EXPECT_EQ(plan->gradients[2].count, 1u);
}

TEST(LayoutPlanTest, RefusesEveryWrongLayout) {
  const auto expect_refused = [](const char* why, const auto& change) {
    v1::LayoutAssigned assigned = Assigned();
    change(&assigned);
    EXPECT_EQ(CheckedPlan(Valid(), assigned).status().code(), absl::StatusCode::kInternal) << why;
  };
  using Assigned = v1::LayoutAssigned;
  expect_refused("bucket beyond the arena", [](Assigned* a) { a->set_arena_bytes(319); });
  expect_refused("count overflows",
                 [](Assigned* a) { a->mutable_buckets(1)->set_count(1ull << 62); });
  expect_refused("buckets overlap", [](Assigned* a) { a->mutable_buckets(1)->set_offset(0); });
  expect_refused("misaligned bucket", [](Assigned* a) { a->mutable_buckets(1)->set_offset(64); });
  expect_refused("no such dtype", [](Assigned* a) {
    a->mutable_buckets(0)->set_dtype(static_cast<v1::DataType>(9));
  });
  expect_refused("placement missing", [](Assigned* a) { a->mutable_placements()->RemoveLast(); });
  expect_refused("no such bucket", [](Assigned* a) { a->mutable_placements(0)->set_bucket(2); });
  expect_refused("dtype of another bucket",
                 [](Assigned* a) { a->mutable_placements(2)->set_bucket(1); });
  expect_refused("outside its bucket",
                 [](Assigned* a) { a->mutable_placements(0)->set_offset(256); });
  expect_refused("before its bucket",
                 [](Assigned* a) { a->mutable_placements(1)->set_offset(64); });
  expect_refused("misaligned parameter",
                 [](Assigned* a) { a->mutable_placements(1)->set_offset(136); });
  expect_refused("parameters overlap",
                 [](Assigned* a) { a->mutable_placements(1)->set_offset(192); });
}

TEST(LayoutPlanTest, ExplicitBucketsMustMatch) {
  LayoutSpec spec;
  spec.explicit_buckets = {{DataType::kBfloat16, 1}, {DataType::kFloat32, 48}};
  v1::LayoutAssigned assigned = Assigned();
  assigned.clear_placements();
  EXPECT_TRUE(CheckedPlan(spec, assigned).ok());
  spec.explicit_buckets[1].count = 47;
  EXPECT_FALSE(CheckedPlan(spec, assigned).ok());
  spec.explicit_buckets.pop_back();
  EXPECT_FALSE(CheckedPlan(spec, assigned).ok());
}

}  // namespace
}  // namespace gradsync::client
