// What goes over a stream between daemons comes out as it went in.

#include "daemon/peer/rank_messages.h"

#include <memory>
#include <variant>

#include "daemon/base/error.h"
#include "daemon/rpc/decode.h"
#include "daemon/rpc/encode.h"
#include "daemon/rpc/status_mapping.h"
#include "gtest/gtest.h"

namespace gradsync {
namespace {

constexpr std::uint64_t kNow = 1'000'000'000;
constexpr std::uint64_t kMs = 1'000'000;

template <class Message>
Message Carried(const Message& message) {
  v1::SessionResponse response;
  Encode(SessionMessage(message), &response);
  const auto back = DecodeSessionMessage(response);
  EXPECT_TRUE(back.has_value());
  EXPECT_TRUE(std::holds_alternative<Message>(*back));
  return std::get<Message>(*back);
}

TEST(RankMessagesTest, OpenSession) {
  JoinRequest join;
  join.key.job_id = "run";
  join.key.token_hash = std::string(32, 'h');
  join.rank = 3;
  join.world_size = 4;
  join.options = {
      true, 7000 * kMs, {8, NcclAlgorithm::kTree, NcclProtocol::kSimple, NcclWireType::kBfloat16}};
  join.client = "test";
  v1::OpenSession open;
  EncodeOpen(join, &open);
  EXPECT_TRUE(open.token().empty());
  std::uint32_t protocol = 0;
  const auto request = DecodeOpen(open, &protocol);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->job_id, "run");
  EXPECT_EQ(request->rank, 3u);
  EXPECT_EQ(request->world_size, 4u);
  EXPECT_TRUE(request->divide_by_world);
  EXPECT_EQ(request->step_timeout_ns, 7000 * kMs);
  EXPECT_EQ(request->nccl.max_ctas, 8u);
  EXPECT_EQ(request->nccl.algorithm, NcclAlgorithm::kTree);
  EXPECT_EQ(request->nccl.protocol, NcclProtocol::kSimple);
  EXPECT_EQ(request->nccl.wire_type, NcclWireType::kBfloat16);
  EXPECT_EQ(request->client, "test");
}

TEST(RankMessagesTest, RegisterLayout) {
  LayoutRequest request;
  request.request_id = 9;
  request.spec.name = "model";
  request.spec.parameters = {{"a", {2, 3}, DataType::kBfloat16}, {"b", {}, DataType::kFloat64}};
  request.spec.average = false;
  request.spec.bucket_cap_bytes = 77;
  request.spec.last_bucket_cap_bytes = 5;
  request.replaces = 4;
  request.deadline_ns = kNow + 500 * kMs;
  v1::RegisterLayout message;
  EncodeRegister(request, kNow, &message);
  const auto back = DecodeLayout(message, DecodeLimits(), kNow);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(FirstDifference(back->spec, 0, request.spec, 1), "");
  EXPECT_EQ(back->request_id, 9u);
  EXPECT_EQ(back->replaces, 4u);
  EXPECT_EQ(back->deadline_ns, request.deadline_ns);

  const auto plan = PlanLayout(request.spec, 100);
  ASSERT_TRUE(plan.ok());
  v1::LayoutAssigned assigned;
  Encode(*plan, &assigned);
  EXPECT_TRUE(SameBuckets(*plan, assigned));
  assigned.mutable_buckets(0)->set_count(12345);
  EXPECT_FALSE(SameBuckets(*plan, assigned));
}

TEST(RankMessagesTest, Operations) {
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

TEST(RankMessagesTest, StepDone) {
  auto record = std::make_shared<StepRecord>();
  record->times.step = 7;
  record->times.complete = true;
  record->times.buckets = {{{11, 12}, 13, 14}};
  record->used_map = "\x05";
  record->live_ranks = 2;
  record->divisor = 4;
  record->numbers = {{1.5, 2}};
  const auto done = Carried(StepDoneMessage{3, record});
  EXPECT_EQ(done.channel, 3u);
  EXPECT_EQ(done.record->times.step, 7u);
  EXPECT_TRUE(done.record->verdict.ok());
  EXPECT_EQ(done.record->times.buckets[0].ready_ns, (std::vector<std::uint64_t>{11, 12}));
  EXPECT_EQ(done.record->times.buckets[0].finish_ns, 14u);
  EXPECT_EQ(done.record->used_map, "\x05");
  EXPECT_EQ(done.record->live_ranks, 2u);
  EXPECT_EQ(done.record->divisor, 4u);
  EXPECT_EQ(done.record->numbers[0].sum_of_squares, 1.5);
  EXPECT_EQ(done.record->numbers[0].non_finite, 2u);

  record->verdict =
      MakeError(absl::StatusCode::kAborted, "STEP_ABANDONED", "by rank 1", {{"rank", "1"}});
  record->times.complete = false;
  const auto voided = Carried(StepDoneMessage{3, record});
  EXPECT_EQ(voided.record->verdict.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(DetailsOf(voided.record->verdict).reason, "STEP_ABANDONED");
  ASSERT_EQ(DetailsOf(voided.record->verdict).fields.size(), 1u);
  EXPECT_EQ(DetailsOf(voided.record->verdict).fields[0].second, "1");
}

TEST(RankMessagesTest, AStatusOfAPeerIsBounded) {
  const absl::Status error =
      MakeError(absl::StatusCode::kAborted, "RANK_LOST", "rank 1", {{"rank", "1"}});
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

TEST(RankMessagesTest, TheRest) {
  EXPECT_EQ(Carried(LayoutReadyMessage{1, 2, 3}).first_step, 3u);
  EXPECT_EQ(Carried(LayoutFailedMessage{4, absl::AbortedError("x")}).request_id, 4u);
  EXPECT_EQ(Carried(BucketDoneMessage{1, 2, 3, 4, 5}).finish_ns, 5u);
  EXPECT_TRUE(Carried(ChunkReadyMessage{1, 2, 3, true}).write);
  EXPECT_EQ(Carried(OperationDoneMessage{8}).sequence, 8u);
  EXPECT_EQ(Carried(OperationFailedMessage{8, absl::AbortedError("x")}).status.message(), "x");
  const auto leave = Carried(LeaveDoneMessage{2, 9, {{1, 5}}});
  EXPECT_EQ(leave.next_sequence, 9u);
  EXPECT_EQ(leave.next_steps[0].step, 5u);
  EXPECT_FALSE(DecodeSessionMessage(v1::SessionResponse()).has_value());
}

}  // namespace
}  // namespace gradsync
