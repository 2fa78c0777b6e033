// The dispatch of a rank's messages, with a job whose reductions the test completes, and a rank
// whose memory is the test's.

#include "daemon/rpc/rank_dispatch.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"
#include "gtest/gtest.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kStagingBytes = 4096;

class FakeRank final : public RankPort {
 public:
  FakeRank(RankSession session, Job* job) : session_(session), job_(job) {}

  RankSession session() const override { return session_; }
  JobPort& job() const override { return *job_; }
  absl::Status ArenaMapped(std::uint32_t channel) override {
    mapped.push_back(channel);
    return absl::OkStatus();
  }
  absl::StatusOr<StagingMemory> Staging() override {
    ++staged;
    if (!staging.ok()) return staging;
    return StagingMemory{nullptr, window, sizeof(window)};
  }
  absl::Status RegisterLayout(LayoutRequest request) override {
    registered.push_back(std::move(request));
    return absl::OkStatus();
  }
  void Respond(v1::SessionResponse response) override { answers.push_back(std::move(response)); }

  absl::Status staging;  // what Staging() answers
  std::byte window[kStagingBytes] = {};
  std::vector<std::uint32_t> mapped;
  int staged = 0;  // calls of Staging()
  std::vector<LayoutRequest> registered;
  std::vector<v1::SessionResponse> answers;

 private:
  const RankSession session_;
  Job* const job_;
};

class RankDispatchTest : public JobFixture {
 protected:
  RankDispatchTest() {
    Start(2);
    channel_ = Agree(Spec(2));
  }

  static v1::SessionRequest BucketReady(std::uint32_t channel, std::uint64_t step,
                                        std::uint32_t bucket) {
    v1::SessionRequest request;
    request.mutable_bucket_ready()->set_channel(channel);
    request.mutable_bucket_ready()->set_step(step);
    request.mutable_bucket_ready()->add_buckets(bucket);
    return request;
  }
  static v1::SessionRequest EndStep(std::uint32_t channel, std::uint64_t step, bool ready_rest) {
    v1::SessionRequest request;
    request.mutable_end_step()->set_channel(channel);
    request.mutable_end_step()->set_step(step);
    request.mutable_end_step()->set_ready_rest(ready_rest);
    return request;
  }
  absl::Status Take(FakeRank* rank, const v1::SessionRequest& request) {
    DecodeLimits limits;
    limits.staging_bytes = kStagingBytes;
    return TakeRankRequest(request, limits, clock_.NowNs(), rank);
  }

  std::uint32_t channel_ = 0;
};

TEST_F(RankDispatchTest, StepGoesToTheJob) {
  FakeRank a(Of(0), job_.get()), b(Of(1), job_.get());
  ASSERT_TRUE(Take(&a, BucketReady(channel_, 1, 0)).ok());
  v1::SessionRequest query;
  query.mutable_query_step()->set_channel(channel_);
  query.mutable_query_step()->set_step(1);
  ASSERT_TRUE(Take(&b, query).ok());
  ASSERT_EQ(b.answers.size(), 1u);
  EXPECT_EQ(b.answers[0].step_state().missing(), job_->MissingInStep(channel_, 1));
  EXPECT_NE(b.answers[0].step_state().missing(), "");
  ASSERT_TRUE(Take(&a, EndStep(channel_, 1, /*ready_rest=*/true)).ok());
  ASSERT_TRUE(Take(&b, BucketReady(channel_, 1, 0)).ok());
  ASSERT_TRUE(Take(&b, BucketReady(channel_, 1, 1)).ok());
  ASSERT_TRUE(Take(&b, EndStep(channel_, 1, /*ready_rest=*/false)).ok());
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(0).record->verdict.ok());
}

TEST_F(RankDispatchTest, OperationGetsItsStagingMemory) {
  FakeRank a(Of(0), job_.get()), b(Of(1), job_.get());
  v1::SessionRequest request;
  request.mutable_all_reduce()->set_sequence(1);
  request.mutable_all_reduce()->set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_all_reduce()->set_count(3);
  ASSERT_TRUE(Take(&a, request).ok());
  EXPECT_EQ(a.staged, 1);
  b.staging = absl::FailedPreconditionError("not populated");
  EXPECT_EQ(Take(&b, request), b.staging);
  b.staging = absl::OkStatus();
  ASSERT_TRUE(Take(&b, request).ok());
  reducer_.CompleteAll();
  EXPECT_EQ(Only<OperationDoneMessage>(1).sequence, 1u);
  request.mutable_all_reduce()->set_count(kStagingBytes);
  EXPECT_EQ(ReasonOf(Take(&a, request)), "MALFORMED");
}

TEST_F(RankDispatchTest, OperationWithoutDataNeedsNoStagingMemory) {
  FakeRank a(Of(0), job_.get()), b(Of(1), job_.get());
  v1::SessionRequest barrier, broadcast;
  barrier.mutable_barrier()->set_sequence(1);
  broadcast.mutable_broadcast()->set_sequence(2);
  for (const auto& request : {barrier, broadcast}) {
    for (FakeRank* const rank : {&a, &b}) {
      ASSERT_TRUE(Take(rank, request).ok());
      EXPECT_EQ(rank->staged, 0);
    }
    reducer_.CompleteAll();
    EXPECT_EQ(sink(1).Of<OperationDoneMessage>().size(), 1u);
    TakeAll();
  }
}

TEST_F(RankDispatchTest, RefusedLayoutIsAnAnswer) {
  FakeRank rank(Of(0), job_.get());
  v1::SessionRequest request;
  v1::RegisterLayout* const layout = request.mutable_register_layout();
  layout->set_request_id(7);
  layout->set_name("model");
  ASSERT_TRUE(Take(&rank, request).ok());
  ASSERT_EQ(rank.answers.size(), 1u);
  EXPECT_EQ(rank.answers[0].operation_failed().sequence(), 7u);
  EXPECT_TRUE(rank.answers[0].operation_failed().layout());
  layout->add_explicit_buckets()->set_dtype(v1::DATA_TYPE_FLOAT32);
  layout->mutable_explicit_buckets(0)->set_count(4);
  ASSERT_TRUE(Take(&rank, request).ok());
  ASSERT_EQ(rank.registered.size(), 1u);
  EXPECT_TRUE(rank.registered[0].messages.empty());  // the job is here: nothing is forwarded
  layout->set_replaces(channel_ + 1);
  EXPECT_EQ(ReasonOf(Take(&rank, request)), "UNKNOWN_CHANNEL");
  EXPECT_EQ(rank.registered.size(), 1u);
}

TEST_F(RankDispatchTest, RefusesMessagesThatNoRankSends) {
  FakeRank rank(Of(0), job_.get());
  v1::SessionRequest open, answer, abandon;
  open.mutable_open_session();
  answer.mutable_lease_answer();
  abandon.mutable_abandon_step()->set_channel(channel_);
  abandon.mutable_abandon_step()->set_step(1);
  abandon.mutable_abandon_step()->set_reason(std::string(1025, 'x'));
  v1::SessionRequest nameless, endless;
  nameless.mutable_begin_collective();
  endless.mutable_begin_collective()->set_description(std::string(257, 'x'));
  for (const auto& request : {open, answer, abandon, nameless, endless, v1::SessionRequest()}) {
    EXPECT_EQ(ReasonOf(Take(&rank, request)), "MALFORMED") << request.DebugString();
  }
}

TEST_F(RankDispatchTest, CollectivesOfTwoRanksAreCompared) {
  FakeRank a(Of(0), job_.get()), b(Of(1), job_.get());
  v1::SessionRequest request;
  request.mutable_begin_collective()->set_description(std::string(256, 'x'));
  ASSERT_TRUE(Take(&a, request).ok());
  request.mutable_begin_collective()->set_description("another");
  ASSERT_TRUE(Take(&b, request).ok());
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "OPERATION_MISMATCH");
}

TEST_F(RankDispatchTest, QueryOfCollectivesIsAnsweredByANotice) {
  FakeRank a(Of(0), job_.get());
  v1::SessionRequest begin, query;
  begin.mutable_begin_collective()->set_description("barrier");
  ASSERT_TRUE(Take(&a, begin).ok());
  query.mutable_query_collectives()->set_waited_ms(5000);
  ASSERT_TRUE(Take(&a, query).ok());
  EXPECT_EQ(Only<StillWaitingMessage>(0).text,
            "a collective after 5s: rank 1 has not begun collective 1 (barrier)");
}

TEST_F(RankDispatchTest, PositionsOfTwoRanksAreCompared) {
  FakeRank a(Of(0), job_.get()), b(Of(1), job_.get());
  v1::SessionRequest ready = BucketReady(channel_, 1, 0), end = EndStep(channel_, 1, true);
  ready.mutable_bucket_ready()->mutable_position()->set_batch(3);
  end.mutable_end_step()->mutable_position()->set_batch(4);
  ASSERT_TRUE(Take(&a, ready).ok());
  const absl::Status differs = Take(&b, end);
  EXPECT_EQ(ReasonOf(differs), "POSITION_MISMATCH");
  EXPECT_TRUE(Says(differs, "rank 1 is at epoch 0, batch 4, rank 0 at epoch 0, batch 3"))
      << differs;
}

// The policy of this job is not `hold`: so the job, which gets each of them, refuses it.
TEST_F(RankDispatchTest, MessagesAboutTheStateGoToTheJob) {
  FakeRank rank(Of(0), job_.get());
  v1::SessionRequest fetch, offer, written, read, digests, refused;
  fetch.mutable_fetch_state();
  offer.mutable_state_offer()->set_bytes(5);
  written.mutable_state_written();
  read.mutable_state_read();
  digests.mutable_state_digests();
  refused.mutable_state_refused();
  for (const auto& request : {fetch, offer, written, read, digests, refused}) {
    const absl::Status status = Take(&rank, request);
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION") << request.DebugString();
    EXPECT_TRUE(Says(status, "needs on_rank_loss=hold")) << status;
  }
  EXPECT_EQ(rank.staged, 2);
  rank.staging = absl::FailedPreconditionError("not populated");
  for (const auto& request : {fetch, offer}) EXPECT_EQ(Take(&rank, request), rank.staging);
}

TEST_F(RankDispatchTest, MalformedMessagesAboutTheStateAreRefused) {
  FakeRank rank(Of(0), job_.get());
  v1::SessionRequest offer, digests, refused;
  offer.mutable_state_offer();
  digests.mutable_state_digests()->add_items();
  refused.mutable_state_refused()->set_reason(std::string(1025, 'x'));
  for (const auto& request : {offer, digests, refused}) {
    EXPECT_EQ(ReasonOf(Take(&rank, request)), "MALFORMED") << request.DebugString();
  }
}

TEST_F(RankDispatchTest, MappingAndLeavingGoOn) {
  FakeRank rank(Of(0), job_.get());
  v1::SessionRequest mapped, leave;
  mapped.mutable_arena_mapped()->set_channel(9);
  ASSERT_TRUE(Take(&rank, mapped).ok());
  EXPECT_EQ(rank.mapped, std::vector<std::uint32_t>{9});
  leave.mutable_leave()->set_exit(true);
  ASSERT_TRUE(Take(&rank, leave).ok());
  EXPECT_EQ(job_->StateOf(0), RankState::kExited);
}

}  // namespace
}  // namespace gradsync::daemon
