#include "daemon/peer/rank_messages.h"

#include "daemon/base/error.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNow = 1'000'000'000;
constexpr std::uint64_t kMs = 1'000'000;

TEST(RankMessagesTest, SameBucketsComparesEveryBucket) {
  LayoutSpec spec;
  spec.parameters = {{"a", {2, 3}, DataType::kBfloat16}, {"b", {}, DataType::kFloat64}};
  const auto plan = PlanLayout(spec, 100);
  ASSERT_TRUE(plan.ok());
  v1::LayoutAssigned assigned;
  Encode(*plan, &assigned);
  EXPECT_TRUE(SameBuckets(*plan, assigned));
  v1::LayoutAssigned other = assigned;
  other.mutable_buckets(0)->set_count(12345);
  EXPECT_FALSE(SameBuckets(*plan, other));
  other = assigned;
  other.mutable_buckets()->RemoveLast();
  EXPECT_FALSE(SameBuckets(*plan, other));
  other = assigned;
  other.set_arena_bytes(1);
  EXPECT_FALSE(SameBuckets(*plan, other));
}

TEST(RankMessagesTest, OperationsDecodeToWhatTheyWere) {
  OperationSpec broadcast;
  broadcast.kind = OperationKind::kBroadcast;
  broadcast.root = kLowestLiveRank;
  broadcast.bytes = 4096;
  v1::SessionRequest message;
  EncodeOperation(5, broadcast, kNow + kMs, kNow, &message);
  const auto back = DecodeBroadcast(message.broadcast(), 1 << 20, kNow);
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(back->spec == broadcast);
  EXPECT_EQ(back->sequence, 5u);

  OperationSpec reduce;
  reduce.kind = OperationKind::kAllReduce;
  reduce.dtype = DataType::kFloat16;
  reduce.count = 12;
  reduce.average = true;
  EncodeOperation(6, reduce, kNow, kNow, &message);
  const auto reduced = DecodeAllReduce(message.all_reduce(), 1 << 20, kNow);
  ASSERT_TRUE(reduced.ok());
  EXPECT_TRUE(reduced->spec == reduce);
}

TEST(RankMessagesTest, StatusFromPeerIsBounded) {
  const absl::Status error =
      MakeError(absl::StatusCode::kAborted, reason::kRankLost, "rank 1", {{field::kRank, "1"}});
  EXPECT_EQ(StatusFromPeer(ToProto(error)), error);
  google::rpc::Status endless = ToProto(error);
  endless.set_code(4711);
  endless.set_message(std::string(1 << 20, 'x'));
  endless.mutable_details(0)->set_value(std::string(1 << 20, 'x'));
  const absl::Status clipped = StatusFromPeer(endless);
  EXPECT_EQ(clipped.code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(clipped.message().size(), 4096u);
  EXPECT_EQ(DetailsOf(clipped).reason, "");
}

}  // namespace
}  // namespace gradsync::daemon
