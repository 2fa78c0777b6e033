// Requests that come in several messages.

#include "daemon/rpc/request_parts.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "daemon/base/error.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNowNs = 5;

v1::SessionRequest Part(const std::vector<std::string>& names) {
  v1::SessionRequest request;
  for (const std::string& name : names) {
    v1::Parameter& parameter = *request.mutable_layout_part()->add_parameters();
    parameter.set_name(name);
    parameter.add_shape(2);
    parameter.set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  return request;
}

// A RegisterLayout with these parameters.
v1::SessionRequest Last(const std::vector<std::string>& names) {
  v1::SessionRequest request;
  request.mutable_register_layout()->set_name("model");
  v1::SessionRequest part = Part(names);
  *request.mutable_register_layout()->mutable_parameters() =
      std::move(*part.mutable_layout_part()->mutable_parameters());
  return request;
}

v1::StateDigests Digests(std::uint64_t transfer, const std::vector<std::string>& names, bool more) {
  v1::StateDigests message;
  message.set_transfer(transfer);
  message.set_more(more);
  for (const std::string& name : names) {
    v1::StateDigest& item = *message.add_items();
    item.set_name(name);
    item.set_sha256(std::string(32, 'x'));
  }
  return message;
}

class RequestPartsTest : public testing::Test {
 protected:
  void Add(const v1::SessionRequest& part) { parts_.AddLayoutPart(part, limits_, forward_); }
  absl::StatusOr<LayoutRequest> Take(const v1::SessionRequest& last) {
    return parts_.TakeLayout(last, limits_, forward_, kNowNs);
  }

  DecodeLimits limits_;
  bool forward_ = false;
  RequestParts parts_;
};

TEST_F(RequestPartsTest, LayoutHasThePartsFirst) {
  Add(Part({"a", "b"}));
  Add(Part({"c"}));
  const auto layout = Take(Last({"d"}));
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::string names;
  for (const Parameter& parameter : layout->spec.parameters) names += parameter.name;
  EXPECT_EQ(names, "abcd");
  EXPECT_TRUE(layout->messages.empty());
  // The next layout has parts of its own.
  EXPECT_EQ(Take(Last({"e"}))->spec.parameters.size(), 1u);
}

TEST_F(RequestPartsTest, BucketsComeInPartsToo) {
  v1::SessionRequest part;
  part.mutable_layout_part()->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_INT32);
  v1::SessionRequest last = Last({});
  last.mutable_register_layout()->set_op(v1::REDUCE_OP_SUM);
  last.mutable_register_layout()->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT64);
  Add(part);
  const auto layout = Take(last);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->spec.explicit_buckets.size(), 2u);
  EXPECT_EQ(layout->spec.explicit_buckets[0].first, DataType::kInt32);
}

TEST_F(RequestPartsTest, ForwardedLayoutKeepsItsMessages) {
  forward_ = true;
  Add(Part({"a"}));
  const auto layout = Take(Last({"b"}));
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->messages.size(), 2u);
  EXPECT_TRUE(layout->messages[0]->has_layout_part());
  EXPECT_TRUE(layout->messages[1]->has_register_layout());
}

TEST_F(RequestPartsTest, QuotaHoldsForAllParts) {
  limits_.parameters = 3;
  Add(Part({"a", "b"}));
  Add(Part({"c", "d"}));
  Add(Part({"e"}));
  const auto layout = Take(Last({"f"}));
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(layout.status().message().find("4 parameters; 3 allowed"), std::string::npos)
      << layout.status();
  EXPECT_TRUE(Take(Last({"g"})).ok()) << "the next layout is another one";
}

TEST_F(RequestPartsTest, NamesAreUniqueOverAllParts) {
  Add(Part({"a"}));
  const auto layout = Take(Last({"a"}));
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(layout.status().message().find("'a' is given twice"), std::string::npos);
}

TEST_F(RequestPartsTest, WrongPartIsTheLayoutsError) {
  Add(Part({""}));
  Add(Part({"a"}));
  const auto layout = Take(Last({"b"}));
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(layout.status().message().find("parameter 0: its name"), std::string::npos);
}

TEST_F(RequestPartsTest, DigestsAreCompleteWithTheLastPart) {
  auto digests = parts_.TakeDigests(Digests(1, {"a"}, /*more=*/true));
  ASSERT_TRUE(digests.ok());
  EXPECT_FALSE(digests->has_value());
  digests = parts_.TakeDigests(Digests(1, {"b"}, /*more=*/false));
  ASSERT_TRUE(digests.ok() && digests->has_value());
  ASSERT_EQ((*digests)->items.size(), 2u);
  EXPECT_EQ((*digests)->items[1].name, "b");
  digests = parts_.TakeDigests(Digests(1, {"c"}, /*more=*/false));
  EXPECT_EQ((*digests)->items.size(), 1u);
}

TEST_F(RequestPartsTest, DigestsOfAnEarlierTransferAreDropped) {
  ASSERT_TRUE(parts_.TakeDigests(Digests(1, {"a"}, /*more=*/true)).ok());
  const auto digests = parts_.TakeDigests(Digests(2, {"b"}, /*more=*/false));
  ASSERT_TRUE(digests.ok() && digests->has_value());
  EXPECT_EQ((*digests)->items.size(), 1u);
}

TEST_F(RequestPartsTest, DigestsAreBounded) {
  const v1::StateDigests part =
      Digests(1, std::vector<std::string>(64, std::string(1000, 'n')), true);
  absl::Status end;
  for (int i = 0; i < 1000 && end.ok(); ++i) end = parts_.TakeDigests(part).status();
  EXPECT_EQ(end.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(end.message().find("16777216 bytes"), std::string::npos) << end;
}

// ---- What parts cost their user

TEST(ChargedPartsTest, LayoutIsChargedUntilItIsTaken) {
  ArenaQuota quota(20'000, "quota_control_bytes_per_user", "memory");
  RequestParts parts({&quota, Tenant(7)});
  parts.AddLayoutPart(Part({std::string(500, 'a')}), {}, /*forward=*/true);
  const std::uint64_t one = quota.bytes_of(Tenant(7));
  EXPECT_GT(one, 500u);
  parts.AddLayoutPart(Part({std::string(500, 'b')}), {}, /*forward=*/true);
  EXPECT_GT(quota.bytes_of(Tenant(7)), one + 500);
  {
    const auto layout = parts.TakeLayout(Last({"c"}), {}, /*forward=*/true, kNowNs);
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_GT(quota.bytes_of(Tenant(7)), 1000u);
  }
  EXPECT_EQ(quota.bytes_of(Tenant(7)), 0u);
}

TEST(ChargedPartsTest, ManyPartsAreChargedForTheirItemsOnce) {
  ArenaQuota quota(20'000, "quota_control_bytes_per_user", "memory");
  RequestParts parts({&quota, Tenant(7)});
  std::vector<Parameter> parameters;
  for (int i = 0; i < 50; ++i) {
    const std::string name = "p" + std::to_string(i);
    parts.AddLayoutPart(Part({name}), {}, /*forward=*/false);
    parameters.push_back({name, {2}, DataType::kFloat32});
    ASSERT_EQ(quota.bytes_of(Tenant(7)), BytesOf(parameters)) << name;
  }
  v1::SessionRequest buckets;
  for (int i = 0; i < 3; ++i) {
    buckets.mutable_layout_part()->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_INT32);
  }
  parts.AddLayoutPart(buckets, {}, /*forward=*/false);
  EXPECT_EQ(quota.bytes_of(Tenant(7)),
            BytesOf(parameters) + 3 * sizeof(LayoutItems().buckets.front()));
  // A wrong part drops them. After the layout, parts are counted from 0.
  parts.AddLayoutPart(Part({""}), {}, /*forward=*/false);
  EXPECT_EQ(quota.bytes_of(Tenant(7)), 0u);
  EXPECT_FALSE(parts.TakeLayout(Last({"c"}), {}, /*forward=*/false, kNowNs).ok());
  parts.AddLayoutPart(Part({"p0"}), {}, /*forward=*/false);
  EXPECT_EQ(quota.bytes_of(Tenant(7)), BytesOf(absl::MakeConstSpan(parameters).first(1)));
  ASSERT_TRUE(parts.TakeLayout(Last({"c"}), {}, /*forward=*/false, kNowNs).ok());
  parts.AddLayoutPart(Part({"p0"}), {}, /*forward=*/false);
  EXPECT_EQ(quota.bytes_of(Tenant(7)), BytesOf(absl::MakeConstSpan(parameters).first(1)));
}

TEST(ChargedPartsTest, TooMuchIsTheLayoutsError) {
  ArenaQuota quota(20'000, "quota_control_bytes_per_user", "memory");
  RequestParts parts({&quota, Tenant(7)});
  for (int i = 0; i < 100; ++i) {
    parts.AddLayoutPart(Part({std::to_string(i) + std::string(500, 'n')}), {}, /*forward=*/false);
    EXPECT_LE(quota.bytes_of(Tenant(7)), 20'000u);
  }
  EXPECT_EQ(quota.bytes_of(Tenant(7)), 0u) << "what was refused is dropped";
  const auto layout = parts.TakeLayout(Last({"c"}), {}, /*forward=*/false, kNowNs);
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(layout.status()).reason, "QUOTA");
}

TEST(ChargedPartsTest, DigestsAreChargedForAsLongAsTheyAreKept) {
  ArenaQuota quota(20'000, "quota_control_bytes_per_user", "memory");
  RequestParts parts({&quota, Tenant(7)});
  const auto large = std::vector<std::string>(10, std::string(1000, 'n'));
  ASSERT_TRUE(parts.TakeDigests(Digests(1, large, /*more=*/true)).ok());
  auto kept = parts.TakeDigests(Digests(1, {"a"}, /*more=*/false));
  ASSERT_TRUE(kept.ok() && kept->has_value());
  EXPECT_GT(quota.bytes_of(Tenant(7)), 10'000u);
  ASSERT_TRUE(parts.TakeDigests(Digests(2, {"a"}, /*more=*/false)).ok());
  EXPECT_GT(quota.bytes_of(Tenant(7)), 10'000u) << "others do not pay for them";
  kept = std::nullopt;
  EXPECT_EQ(quota.bytes_of(Tenant(7)), 0u);
  ASSERT_TRUE(parts.TakeDigests(Digests(3, large, /*more=*/true)).ok());
  EXPECT_EQ(parts.TakeDigests(Digests(3, large, /*more=*/true)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace gradsync::daemon
