#include "daemon/rpc/encode.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "daemon/base/error.h"
#include "daemon/rpc/message_memory.h"
#include "google/rpc/error_details.pb.h"

namespace gradsync::daemon {
namespace {

v1::SessionResponse Encoded(const SessionMessage& message) {
  v1::SessionResponse response;
  // The old content must not show in the new one.
  response.mutable_step_done()->set_step(99);
  Encode(message, &response);
  return response;
}

std::string ReasonOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  EXPECT_EQ(status.details_size(), 1);
  if (status.details_size() == 1) status.details(0).UnpackTo(&info);
  return info.reason();
}

absl::Status Failure() { return MakeError(absl::StatusCode::kAborted, Reason("WHY"), "because"); }

std::shared_ptr<StepRecord> Record(const absl::Status& verdict) {
  auto record = std::make_shared<StepRecord>();
  record->verdict = verdict;
  record->times.step = 7;
  record->times.complete = verdict.ok();
  record->times.commit_ns = 500;
  record->times.buckets = {{{100, 0, 120}, 130, 140}, {{0, 0, 0}, 0, 0}};
  record->used_map = "\x05";
  record->live_ranks = 2;
  record->divisor = 3;
  if (verdict.ok()) record->stats = {{2.25, 0}, {0, 9}};
  return record;
}

TEST(QueuedBytesTest, CountsTimesAndUsedMapOfAStep) {
  const auto record = Record(absl::OkStatus());
  record->times.buckets.resize(1000, record->times.buckets.front());  // 3 ranks each
  record->used_map = std::string(5000, 'u');
  const std::size_t bytes = QueuedBytes(StepDoneMessage{4, record});
  EXPECT_GE(bytes, 1000 * 5 * sizeof(std::uint64_t) + 5000);
  EXPECT_GE(bytes, Encoded(StepDoneMessage{4, record}).ByteSizeLong());
  EXPECT_LE(bytes, 200'000u);
}

TEST(QueuedBytesTest, CountsTheTextOfAnError) {
  const absl::Status status = absl::AbortedError(std::string(10'000, 'e'));
  EXPECT_GE(QueuedBytes(OperationFailedMessage{1, status}), 10'000u);
  EXPECT_GE(QueuedBytes(LayoutFailedMessage{1, status}), 10'000u);
  EXPECT_GE(QueuedBytes(SessionEndMessage{status}), 10'000u);
  EXPECT_GE(QueuedBytes(StateFailedMessage{status}), 10'000u);
  EXPECT_LE(QueuedBytes(OperationDoneMessage{1}), 1000u);
}

// An empty group has 2 bytes on the wire, and takes about 50 in memory.
TEST(WithoutUnknownFieldsTest, KeepsWhatIsKnownAndNoMemoryOfTheRest) {
  v1::OpenSession known;
  known.set_job_id("run");
  known.mutable_options()->set_step_timeout_ms(7);
  v1::OpenSession message = known;
  std::string groups;
  for (int i = 0; i < 1000; ++i) groups += "\x5B\x5C";  // field 11 begins and ends
  ASSERT_TRUE(message.MergeFromString(groups));
  ASSERT_TRUE(message.mutable_options()->MergeFromString(groups));
  ASSERT_GT(MemoryOf(message), MemoryOf(known) + 2000 * 16);
  const v1::OpenSession kept = WithoutUnknownFields(message);
  EXPECT_EQ(kept.SerializeAsString(), known.SerializeAsString());
  EXPECT_EQ(MemoryOf(kept), MemoryOf(known));
}

TEST(QueuedBytesTest, CountsTheMemoryOfAForwardedMessage) {
  EXPECT_GE(QueuedBytes(ForwardedMessage{nullptr, 10'000}), 10'000u);
}

// Parameters without elements have empty placements: 2 bytes each on the wire.
TEST(QueuedBytesTest, CountsTheMemoryOfALayoutsPlacements) {
  LayoutPlan plan;
  plan.buckets.resize(1000);
  plan.placements.resize(100'000);
  v1::SessionResponse answer;
  Encode(plan, answer.mutable_layout_assigned());
  const std::size_t bytes = QueuedBytes(answer);
  EXPECT_GE(bytes, answer.SpaceUsedLong() + 101'000 * kMallocBytes);
  EXPECT_LE(bytes, answer.SpaceUsedLong() * 3 / 2);
  EXPECT_GT(bytes, 20 * answer.ByteSizeLong());
}

TEST(QueuedBytesTest, CountsTheMemoryOfOtherAnswers) {
  v1::SessionResponse answer;
  auto* const layout = answer.mutable_session_opened()->add_layouts()->mutable_layout();
  for (int i = 0; i < 1000; ++i) layout->add_parameters();
  EXPECT_GE(QueuedBytes(answer), 1000 * (sizeof(v1::Parameter) + kMallocBytes));
  answer.mutable_step_state()->set_missing(std::string(10'000, 'm'));
  EXPECT_GE(QueuedBytes(answer), 10'000u);
  EXPECT_LE(QueuedBytes(answer), 11'000u) << "a text takes little more than itself";
}

TEST(EncodeTest, WritesACompleteStep) {
  const auto response = Encoded(StepDoneMessage{4, Record(absl::OkStatus())});
  ASSERT_EQ(response.kind_case(), v1::SessionResponse::kStepDone);
  const v1::StepDone& done = response.step_done();
  EXPECT_EQ(done.channel(), 4u);
  EXPECT_EQ(done.step(), 7u);
  EXPECT_EQ(done.verdict(), v1::VERDICT_COMPLETE);
  EXPECT_FALSE(done.has_status());
  EXPECT_EQ(done.used_map(), "\x05");
  EXPECT_EQ(done.live_ranks(), 2u);
  EXPECT_EQ(done.divisor(), 3u);
  ASSERT_EQ(done.buckets_size(), 2);
  EXPECT_EQ(done.buckets(0).bucket(), 0u);
  ASSERT_EQ(done.buckets(0).ready_ns_size(), 3);
  EXPECT_EQ(done.buckets(0).ready_ns(1), 0u);  // did not take part
  EXPECT_EQ(done.buckets(0).ready_ns(2), 120u);
  EXPECT_EQ(done.buckets(0).start_ns(), 130u);
  EXPECT_EQ(done.buckets(0).finish_ns(), 140u);
  EXPECT_EQ(done.buckets(1).bucket(), 1u);
  ASSERT_EQ(done.sum_of_squares_size(), 2);
  ASSERT_EQ(done.non_finite_size(), 2);
  EXPECT_EQ(done.sum_of_squares(0), 2.25);
  EXPECT_EQ(done.non_finite(0), 0u);
  EXPECT_EQ(done.non_finite(1), 9u);
}

TEST(EncodeTest, WritesWhyAStepIsVoid) {
  const v1::StepDone done = Encoded(StepDoneMessage{4, Record(Failure())}).step_done();
  EXPECT_EQ(done.verdict(), v1::VERDICT_VOID);
  EXPECT_EQ(done.status().code(), 10);
  EXPECT_EQ(done.status().message(), "because");
  EXPECT_EQ(ReasonOf(done.status()), "WHY");
  EXPECT_EQ(done.sum_of_squares_size(), 0);
  EXPECT_EQ(done.non_finite_size(), 0);
}

TEST(EncodeTest, WritesLayoutMessages) {
  const auto ready = Encoded(LayoutReadyMessage{3, 0xfeed, 1});
  ASSERT_EQ(ready.kind_case(), v1::SessionResponse::kLayoutReady);
  EXPECT_EQ(ready.layout_ready().channel(), 3u);
  EXPECT_EQ(ready.layout_ready().fingerprint(), 0xfeedu);
  EXPECT_EQ(ready.layout_ready().first_step(), 1u);
  const auto failed = Encoded(LayoutFailedMessage{8, Failure()});
  ASSERT_EQ(failed.kind_case(), v1::SessionResponse::kOperationFailed);
  EXPECT_TRUE(failed.operation_failed().layout());
  EXPECT_EQ(failed.operation_failed().sequence(), 8u);
  EXPECT_EQ(ReasonOf(failed.operation_failed().status()), "WHY");
}

TEST(EncodeTest, WritesADoneBucket) {
  const auto response = Encoded(BucketDoneMessage{1, 2, 3, 4, 5});
  ASSERT_EQ(response.kind_case(), v1::SessionResponse::kBucketDone);
  EXPECT_EQ(response.bucket_done().channel(), 1u);
  EXPECT_EQ(response.bucket_done().step(), 2u);
  EXPECT_EQ(response.bucket_done().bucket(), 3u);
  EXPECT_EQ(response.bucket_done().start_ns(), 4u);
  EXPECT_EQ(response.bucket_done().finish_ns(), 5u);
}

TEST(EncodeTest, WritesOperationMessages) {
  const auto chunk = Encoded(ChunkReadyMessage{1, 2, 3, true});
  ASSERT_EQ(chunk.kind_case(), v1::SessionResponse::kChunkReady);
  EXPECT_EQ(chunk.chunk_ready().sequence(), 1u);
  EXPECT_EQ(chunk.chunk_ready().chunk(), 2u);
  EXPECT_EQ(chunk.chunk_ready().bytes(), 3u);
  EXPECT_TRUE(chunk.chunk_ready().write());
  const auto done = Encoded(OperationDoneMessage{6});
  ASSERT_EQ(done.kind_case(), v1::SessionResponse::kOperationDone);
  EXPECT_EQ(done.operation_done().sequence(), 6u);
  const auto failed = Encoded(OperationFailedMessage{6, Failure()});
  ASSERT_EQ(failed.kind_case(), v1::SessionResponse::kOperationFailed);
  EXPECT_FALSE(failed.operation_failed().layout());
  EXPECT_EQ(failed.operation_failed().channel(), 0u);
  EXPECT_EQ(failed.operation_failed().sequence(), 6u);
  EXPECT_EQ(ReasonOf(failed.operation_failed().status()), "WHY");
}

TEST(EncodeTest, WritesMessagesAboutTheState) {
  const auto question = Encoded(StateQuestionMessage{4, true});
  ASSERT_EQ(question.kind_case(), v1::SessionResponse::kStateQuestion);
  EXPECT_EQ(question.state_question().transfer(), 4u);
  EXPECT_TRUE(question.state_question().offer());
  const auto begin = Encoded(StateBeginMessage{4, 5, 6});
  ASSERT_EQ(begin.kind_case(), v1::SessionResponse::kStateBegin);
  EXPECT_EQ(begin.state_begin().transfer(), 4u);
  EXPECT_EQ(begin.state_begin().bytes(), 5u);
  EXPECT_EQ(begin.state_begin().source(), 6u);
  const auto chunk = Encoded(StateChunkMessage{4, 5, 6, true});
  ASSERT_EQ(chunk.kind_case(), v1::SessionResponse::kStateChunk);
  EXPECT_EQ(chunk.state_chunk().transfer(), 4u);
  EXPECT_EQ(chunk.state_chunk().chunk(), 5u);
  EXPECT_EQ(chunk.state_chunk().bytes(), 6u);
  EXPECT_TRUE(chunk.state_chunk().write());
  EXPECT_EQ(Encoded(StateAdmittedMessage{4}).state_admitted().transfer(), 4u);
  EXPECT_EQ(Encoded(StateCancelledMessage{4}).state_cancelled().transfer(), 4u);
  EXPECT_EQ(ReasonOf(Encoded(StateFailedMessage{Failure()}).state_failed().status()), "WHY");
}

TEST(EncodeTest, WritesALayoutAsAReplacementRegistersIt) {
  CurrentLayout layout;
  layout.step = 9;
  const auto spec = std::make_shared<LayoutSpec>();
  layout.spec = spec;
  spec->name = "model";
  spec->parameters = {{"w", {10, 64}, DataType::kFloat32}, {"b", {}, DataType::kBfloat16}};
  spec->bucket_cap_bytes = 1;
  spec->first_bucket_cap_bytes = 2;
  spec->last_bucket_cap_bytes = 3;
  spec->op = ReduceOp::kSum;
  spec->buffer_bytes = 4;
  v1::CurrentLayout out;
  Encode(layout, &out);
  EXPECT_EQ(out.step(), 9u);
  EXPECT_EQ(out.layout().name(), "model");
  ASSERT_EQ(out.layout().parameters_size(), 2);
  EXPECT_EQ(out.layout().parameters(0).name(), "w");
  ASSERT_EQ(out.layout().parameters(0).shape_size(), 2);
  EXPECT_EQ(out.layout().parameters(0).shape(1), 64u);
  EXPECT_EQ(out.layout().parameters(1).dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(out.layout().bucket_cap_bytes(), 1u);
  EXPECT_EQ(out.layout().first_bucket_cap_bytes(), 2u);
  EXPECT_EQ(out.layout().last_bucket_cap_bytes(), 3u);
  EXPECT_EQ(out.layout().op(), v1::REDUCE_OP_SUM);
  EXPECT_EQ(out.layout().buffer_bytes(), 4u);
  spec->parameters.clear();
  spec->explicit_buckets = {{DataType::kInt32, 7}};
  out.Clear();
  Encode(layout, &out);
  ASSERT_EQ(out.layout().explicit_buckets_size(), 1);
  EXPECT_EQ(out.layout().explicit_buckets(0).dtype(), v1::DATA_TYPE_INT32);
  EXPECT_EQ(out.layout().explicit_buckets(0).count(), 7u);
}

TEST(EncodeTest, WritesEndsAndLeaseQuestions) {
  const auto left = Encoded(LeaveDoneMessage{2, 7, {{3, 8}, {4, 9}}});
  ASSERT_EQ(left.kind_case(), v1::SessionResponse::kLeaveDone);
  EXPECT_EQ(left.leave_done().last_to_leave(), 2u);
  EXPECT_EQ(left.leave_done().next_sequence(), 7u);
  ASSERT_EQ(left.leave_done().next_steps_size(), 2);
  EXPECT_EQ(left.leave_done().next_steps(1).channel(), 4u);
  EXPECT_EQ(left.leave_done().next_steps(1).step(), 9u);
  const auto question = Encoded(LeaseQuestionMessage{11});
  ASSERT_EQ(question.kind_case(), v1::SessionResponse::kLeaseQuestion);
  EXPECT_EQ(question.lease_question().number(), 11u);
  const auto waiting = Encoded(StillWaitingMessage{"layout 'a'"});
  ASSERT_EQ(waiting.kind_case(), v1::SessionResponse::kStillWaiting);
  EXPECT_EQ(waiting.still_waiting().text(), "layout 'a'");
  const auto ending = Encoded(SessionEndMessage{Failure()});
  ASSERT_EQ(ending.kind_case(), v1::SessionResponse::kSessionEnding);
  EXPECT_EQ(ending.session_ending().status().code(), 10);
  EXPECT_EQ(ReasonOf(ending.session_ending().status()), "WHY");
}

TEST(EncodeTest, ForwardedMessageStaysAsItIs) {
  auto response = std::make_shared<v1::SessionResponse>();
  response->mutable_chunk_ready()->set_chunk(5);
  const auto forwarded = Encoded(ForwardedMessage{response});
  EXPECT_EQ(forwarded.SerializeAsString(), response->SerializeAsString());
}

}  // namespace
}  // namespace gradsync::daemon
