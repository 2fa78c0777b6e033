// What a step reports besides its verdict. model_test covers the order of events.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "daemon/arena/device_arena.h"
#include "daemon/arena/semaphore_page.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class StepTest : public JobFixture {
 protected:
  // The used_map that every rank receives after a step in which they sent `used_maps`, for nine
  // parameters.
  std::string Agreed(const std::vector<std::string>& used_maps) {
    for (std::uint32_t rank = 0; rank < used_maps.size(); ++rank) {
      DoStep(rank, channel_, step_, used_maps[rank]);
    }
    ++step_;
    reducer_.CompleteAll();
    const std::string used_map = Only<StepDoneMessage>(0).record->used_map;
    for (std::uint32_t rank = 1; rank < used_maps.size(); ++rank) {
      EXPECT_EQ(Only<StepDoneMessage>(rank).record->used_map, used_map);
    }
    TakeAll();
    return used_map;
  }

  std::uint32_t channel_ = 0;
  std::uint64_t step_ = 1;
};

TEST_F(StepTest, UsedMapsAreCombinedAndAnEmptyOneMeansAll) {
  Start(2);
  channel_ = Agree(Spec(9));
  const std::string none(2, '\0'), first("\1\0", 2), last("\0\1", 2), all("\xff\1", 2);
  EXPECT_EQ(Agreed({first, last}), std::string("\1\1", 2));
  EXPECT_EQ(Agreed({none, none}), none);
  EXPECT_EQ(Agreed({"", ""}), "");
  EXPECT_EQ(Agreed({first, ""}), all);
  EXPECT_EQ(Agreed({"", first}), all);
  EXPECT_EQ(Agreed({last, none}), last);
}

TEST_F(StepTest, UsedMapOfTheWrongSizeIsRefusedWithBothSizes) {
  Start(1);
  channel_ = Agree(Spec(9));
  for (std::uint32_t bucket = 0; bucket < 9; ++bucket) {
    ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {bucket}).ok());
  }
  for (const std::size_t bytes : {1, 3}) {
    const absl::Status status = job_->EndStep(Of(0), channel_, 1, std::string(bytes, '\1'));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "MALFORMED");
    EXPECT_TRUE(Says(status, absl::StrCat(bytes, " bytes, 2 expected"))) << status;
  }
}

TEST_F(StepTest, FinishStepMarksTheRemainingBucketsInOrder) {
  Start(2);
  channel_ = Agree(Spec(4));
  const std::uint64_t start_ns = clock_.NowNs();
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {2}).ok());
  clock_.Advance(10);
  ASSERT_TRUE(job_->FinishStep(Of(0), channel_, 1, "\3").ok());
  EXPECT_EQ(reducer_.submitted(), 0u);
  EXPECT_EQ(job_->MissingInStep(channel_, 1), "rank 1 has not marked bucket 0-3 ready");
  EXPECT_EQ(job_->Snapshot().waiting_ranks, std::vector<std::uint32_t>{1});
  clock_.Advance(10);
  // Marks all buckets at once.
  ASSERT_TRUE(job_->FinishStep(Of(1), channel_, 1, "\4").ok());
  EXPECT_EQ(reducer_.submitted(), 4u);
  reducer_.CompleteAll();
  const StepRecord& record = *Only<StepDoneMessage>(0).record;
  EXPECT_TRUE(record.verdict.ok()) << record.verdict;
  EXPECT_EQ(record.used_map, "\7");
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(record.times.buckets[i].ready_ns,
              (std::vector<std::uint64_t>{i == 2 ? start_ns : start_ns + 10, start_ns + 20}));
  }
  TakeAll();
  // With no bucket left to mark, FinishStep equals EndStep.
  for (std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(job_->MarkReady(Of(rank), channel_, 2, {0, 1, 2, 3}).ok());
    ASSERT_TRUE(job_->FinishStep(Of(rank), channel_, 2, "").ok());
  }
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(1).record->verdict.ok());
}

TEST_F(StepTest, FinishStepOutOfOrderIsRefusedAndMarksNothing) {
  Start(2);
  channel_ = Agree(Spec(2));
  EXPECT_EQ(ReasonOf(job_->FinishStep(Of(0), channel_, 0, "")), "STALE_STEP");
  EXPECT_EQ(ReasonOf(job_->FinishStep(Of(0), channel_, 2, "")), "PROTOCOL_VIOLATION");
  EXPECT_EQ(ReasonOf(job_->FinishStep(Of(0), channel_ + 1, 1, "")), "UNKNOWN_CHANNEL");
  EXPECT_EQ(job_->MissingInStep(channel_, 1), "");
  ASSERT_TRUE(job_->FinishStep(Of(0), channel_, 1, "").ok());
  for (const absl::Status& status :
       {job_->FinishStep(Of(0), channel_, 1, ""), job_->MarkReady(Of(0), channel_, 1, {1})}) {
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(status, "after this rank had ended the step")) << status;
  }
}

TEST_F(StepTest, FinishStepOfAVoidStepIsIgnored) {
  Start(2);
  channel_ = Agree(Spec(2));
  ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, 1, "no").ok());
  EXPECT_TRUE(job_->FinishStep(Of(0), channel_, 1, "").ok());
  EXPECT_EQ(reducer_.submitted(), 0u);
  EXPECT_EQ(job_->MissingInStep(channel_, 2), "");
  TakeAll();
  for (std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(job_->FinishStep(Of(rank), channel_, 2, "").ok());
  }
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(0).record->verdict.ok());
}

TEST_F(StepTest, RecordHoldsReadyReduceAndCommitTimes) {
  Start(2);
  channel_ = Agree(Spec(1));
  const std::uint64_t start_ns = clock_.NowNs();
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0}).ok());
  clock_.Advance(10);
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {0}).ok());
  clock_.Advance(10);
  reducer_.CompleteAll();
  clock_.Advance(10);
  ASSERT_TRUE(job_->EndStep(Of(0), channel_, 1, "").ok());
  ASSERT_TRUE(job_->EndStep(Of(1), channel_, 1, "").ok());
  const StepTimes& times = Only<StepDoneMessage>(0).record->times;
  ASSERT_EQ(times.buckets.size(), 1u);
  EXPECT_EQ(times.buckets[0].ready_ns, (std::vector<std::uint64_t>{start_ns + 10, start_ns}));
  EXPECT_EQ(times.buckets[0].start_ns, start_ns + 20);
  EXPECT_EQ(times.buckets[0].finish_ns, start_ns + 20);
  EXPECT_EQ(times.commit_ns, start_ns + 30);
  // Exposed: from the last mark to the commit; total: to the end of the reduction.
  const LayoutStatsSnapshot stats = job_->Snapshot().layouts[0].stats;
  EXPECT_NEAR(stats.exposed.max_us, 0.02, 0.001);
  EXPECT_NEAR(stats.total.max_us, 0.01, 0.001);
  EXPECT_NEAR(stats.ready_skew.max_us, 0.01, 0.001);
  EXPECT_EQ(stats.bytes_reduced, 16u);
  ASSERT_EQ(stats.stragglers.size(), 1u);
  EXPECT_EQ(stats.stragglers[0].rank, 0u);
}

TEST_F(StepTest, RecordOfACompleteStepHoldsStatsOfEachBucket) {
  Start(2);
  channel_ = Agree(Spec(2));
  const auto first_element = [&](std::uint32_t rank, std::size_t bucket, float value) {
    std::memcpy(memory(rank, channel_).data() + 128 * bucket, &value, sizeof(value));
  };
  first_element(0, 0, 2);
  first_element(1, 0, 4);
  first_element(1, 1, 8);
  DoStep(0, channel_, 1);
  DoStep(1, channel_, 1);
  reducer_.CompleteAll();
  std::shared_ptr<const StepRecord> record = Only<StepDoneMessage>(0).record;
  ASSERT_EQ(record->stats.size(), 2u);
  EXPECT_EQ(record->stats[0].sum_of_squares, 9);
  EXPECT_EQ(record->stats[1].sum_of_squares, 16);
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.gradient_norm, 5);
  TakeAll();

  first_element(1, 1, INFINITY);
  DoStep(0, channel_, 2);
  DoStep(1, channel_, 2);
  reducer_.CompleteAll();
  record = Only<StepDoneMessage>(1).record;
  EXPECT_EQ(record->stats[0].non_finite, 0u);
  EXPECT_EQ(record->stats[1].non_finite, 1u);
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.non_finite, 1u);
  TakeAll();

  // A void step has no stats. The layout's statistics remain those of the last complete step.
  ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, 3, "why not").ok());
  record = Only<StepDoneMessage>(1).record;
  EXPECT_TRUE(record->stats.empty());
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.non_finite, 1u);
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.steps_non_finite, 1u);
}

TEST_F(StepTest, ExposedTimeStartsAnewWithEachStep) {
  Start(1);
  channel_ = Agree(Spec(1));
  DoStep(0, channel_, 1);
  reducer_.CompleteAll();
  clock_.Advance(1'000'000'000);
  DoStep(0, channel_, 2);
  reducer_.CompleteAll();
  EXPECT_EQ(job_->Snapshot().layouts[0].stats.exposed.max_us, 0.0);
}

TEST_F(StepTest, BucketsAreReducedInTheOrderTheyBecomeReady) {
  Start(2);
  channel_ = Agree(Spec(3));
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {2, 0, 1}).ok());
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {1}).ok());
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {2, 0}).ok());
  ASSERT_EQ(reducer_.held().size(), 3u);
  const std::byte* const base = memory(0, channel_).data();
  EXPECT_EQ(reducer_.held()[0]->host().buffers[0], base + 128);
  EXPECT_EQ(reducer_.held()[1]->host().buffers[0], base + 256);
  EXPECT_EQ(reducer_.held()[2]->host().buffers[0], base);
}

TEST_F(StepTest, MarkReadyIsRefusedAtTheFirstWrongBucket) {
  Start(1);
  channel_ = Agree(Spec(3));
  const absl::Status status = job_->MarkReady(Of(0), channel_, 1, {0, 1, 1, 9});
  EXPECT_EQ(ReasonOf(status), "ALREADY_READY");
  EXPECT_EQ(FieldOf(status, "bucket"), "1");
  EXPECT_EQ(FieldOf(status, "channel"), std::to_string(channel_));
  EXPECT_EQ(FieldOf(status, "job"), "run-7");
  Lose(0);
  EXPECT_TRUE(sink(0).Of<SessionEndMessage>().empty());  // two reductions are running
  reducer_.CompleteAll();
  Only<SessionEndMessage>(0);
}

TEST_F(StepTest, UnknownBucketErrorNamesTheBucketCount) {
  Start(1);
  channel_ = Agree(Spec(3));
  for (const std::uint32_t bucket : {3u, 0xffffffffu}) {
    const absl::Status status = job_->MarkReady(Of(0), channel_, 1, {bucket});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "UNKNOWN_BUCKET");
    EXPECT_EQ(FieldOf(status, "bucket"), std::to_string(bucket));
    EXPECT_TRUE(Says(status, "the layout has 3")) << status;
  }
}

TEST_F(StepTest, MissingInStepListsRanksAndBuckets) {
  Start(3);
  channel_ = Agree(Spec(5));
  EXPECT_EQ(job_->MissingInStep(channel_, 1), "");
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {0, 1, 2, 3, 4}).ok());
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {1, 3}).ok());
  EXPECT_EQ(job_->MissingInStep(channel_, 1),
            "rank 0 has not ended the step; rank 1 has not marked bucket 0, 2, 4 ready; "
            "rank 2 has not marked bucket 0-4 ready");
  EXPECT_EQ(job_->Snapshot().layouts[0].waiting_for, job_->MissingInStep(channel_, 1));
  EXPECT_EQ(job_->MissingInStep(channel_, 2), "");
  EXPECT_EQ(job_->MissingInStep(77, 1), "");
  ASSERT_TRUE(job_->EndStep(Of(0), channel_, 1, "").ok());
  DoStep(2, channel_, 1);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0, 2, 4}).ok());
  ASSERT_TRUE(job_->EndStep(Of(1), channel_, 1, "").ok());
  EXPECT_EQ(job_->MissingInStep(channel_, 1), "a reduction is running");
  reducer_.CompleteAll();
  EXPECT_EQ(job_->MissingInStep(channel_, 1), "");
}

TEST_F(StepTest, AbandonedStepNamesRankReasonAndFirstMissingBucket) {
  Start(2);
  channel_ = Agree(Spec(3));
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0, 2}).ok());
  ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, 1, "CUDA out of memory").ok());
  const absl::Status status = Only<StepDoneMessage>(0).record->verdict;
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(status), "STEP_ABANDONED");
  EXPECT_TRUE(Says(status, "CUDA out of memory")) << status;
  EXPECT_EQ(FieldOf(status, "rank"), "1");
  EXPECT_EQ(FieldOf(status, "step"), "1");
  EXPECT_EQ(FieldOf(status, "bucket"), "1");
}

TEST_F(StepTest, LossNamesRankStepBucketAndHowItIsKnown) {
  Start(2);
  channel_ = Agree(Spec(2));
  DoStep(0, channel_, 1);
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0}).ok());
  Lose(1);
  reducer_.CompleteAll();
  const absl::Status status = Only<SessionEndMessage>(0).status;
  EXPECT_TRUE(Says(status,
                   "rank 1 of job 'run-7' was lost in step 1 of layout 'model', bucket 1 "
                   "not ready; known because its process has ended"))
      << status;
  EXPECT_EQ(FieldOf(status, "channel"), std::to_string(channel_));
}

TEST_F(StepTest, LossNamesTheLayoutWhoseStepIsRunning) {
  Start(2);
  const std::uint32_t running = Agree(Spec(1, "generator"));
  Agree(Spec(1, "discriminator"));
  Register(0, Spec(1, "third"));
  ASSERT_TRUE(job_->MarkReady(Of(0), running, 1, {0}).ok());
  Lose(1);
  const absl::Status status = Only<SessionEndMessage>(0).status;
  EXPECT_TRUE(Says(status, "in step 1 of layout 'generator'")) << status;
  EXPECT_EQ(FieldOf(status, "channel"), std::to_string(running));
}

TEST_F(StepTest, LossBetweenStepsNamesOneLayoutInTextAndFields) {
  Start(2);
  const std::uint32_t agreed = Agree(Spec(1, "generator"));
  Register(0, Spec(1, "discriminator"));
  Lose(1);
  const absl::Status status = Only<SessionEndMessage>(0).status;
  EXPECT_TRUE(Says(status, "while layout 'discriminator' was being agreed")) << status;
  EXPECT_NE(FieldOf(status, "channel"), std::to_string(agreed));
  EXPECT_EQ(FieldOf(status, "step"), "");
}

TEST_F(StepTest, LossDoesNotNameALayoutThatWasNeverAgreed) {
  Start(2);
  const std::uint32_t agreed = Agree(Spec(1, "generator"));
  Register(0, Spec(1, "discriminator"));
  ASSERT_FALSE(job_->RegisterLayout(Of(1), Request(Spec(2, "discriminator"))).ok());
  TakeAll();
  Lose(1);
  const absl::Status status = Only<SessionEndMessage>(0).status;
  EXPECT_TRUE(Says(status, "before step 1 of layout 'generator'")) << status;
  EXPECT_EQ(FieldOf(status, "channel"), std::to_string(agreed));
}

TEST_F(StepTest, SumIsNotScaled) {
  Start(2);
  LayoutSpec spec = Spec(1);
  spec.op = ReduceOp::kSum;
  channel_ = Agree(spec);
  memory(0, channel_).At<float>(0)[0] = 3;
  memory(1, channel_).At<float>(0)[0] = 4;
  DoStep(0, channel_, 1);
  DoStep(1, channel_, 1);
  reducer_.CompleteAll();
  EXPECT_EQ(memory(0, channel_).At<float>(0)[0], 7);
  EXPECT_EQ(memory(1, channel_).At<float>(0)[0], 7);
}

TEST_F(StepTest, MessagesForUnreadVoidStepsAreAccepted) {
  Start(2);
  channel_ = Agree(Spec(2));
  for (const std::uint64_t step : {1, 2, 3}) {
    ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, step, "").ok());
  }
  EXPECT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0}).ok());
  EXPECT_TRUE(job_->AbandonStep(Of(1), channel_, 1, "").ok());
  EXPECT_TRUE(job_->EndStep(Of(1), channel_, 2, "").ok());
  EXPECT_EQ(ReasonOf(job_->MarkReady(Of(1), channel_, 1, {0})), "STALE_STEP");
  EXPECT_EQ(ReasonOf(job_->MarkReady(Of(1), channel_, 2, {0})), "STALE_STEP");
  EXPECT_TRUE(job_->MarkReady(Of(1), channel_, 3, {0}).ok());
  const absl::Status ahead = job_->MarkReady(Of(1), channel_, 5, {0});
  EXPECT_EQ(ReasonOf(ahead), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(ahead, "ahead of step 4")) << ahead;
}

TEST_F(StepTest, FailedReductionEndsTheJobAndCompletesNothing) {
  Start(2);
  channel_ = Agree(Spec(2));
  DoStep(0, channel_, 1);
  DoStep(1, channel_, 1);
  reducer_.Complete(reducer_.held().front());
  const std::uint64_t done = memory(0, channel_).done(1);
  reducer_.Fail(reducer_.held().front(), absl::UnavailableError("the engine has failed"));
  for (const std::uint32_t rank : {0, 1}) {
    EXPECT_TRUE(sink(rank).Of<StepDoneMessage>().empty());
    EXPECT_EQ(Only<SessionEndMessage>(rank).status.message(), "the engine has failed");
    EXPECT_EQ(memory(rank, channel_).done(1), done);
  }
}

TEST_F(StepTest, BuffersAreSummedAndHaveNoGradients) {
  Start(2);
  LayoutSpec spec = Spec(1);
  spec.buffer_bytes = 3;
  const std::uint32_t channel = Agree(spec);
  ASSERT_EQ(buckets_[channel - 1], 2u);
  auto* const root = memory(0, channel).At<std::uint8_t>(128);
  root[0] = 7;
  root[2] = 255;
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel, 1);
  for (const ReduceOperation* operation : reducer_.held()) {
    if (operation->bucket != 1) continue;
    EXPECT_EQ(operation->op, ReduceOp::kSum);
    EXPECT_EQ(operation->scale, 1.0);
    EXPECT_FALSE(operation->measure);
  }
  reducer_.CompleteAll();
  const auto* const received = memory(1, channel).At<std::uint8_t>(128);
  EXPECT_EQ(std::string(received, received + 3), std::string("\7\0\xff", 3));
  const auto done = Only<StepDoneMessage>(1);
  ASSERT_TRUE(done.record->verdict.ok()) << done.record->verdict;
  ASSERT_EQ(done.record->stats.size(), 2u);
  EXPECT_EQ(done.record->stats[1].sum_of_squares, 0);
  EXPECT_EQ(done.record->stats[1].non_finite, 0u);
}

// ---- Messages about the next step, which ranks on GPUs may send

class FakeDeviceArena final : public DeviceArena {
 public:
  const std::string& device() const override { return device_; }

 private:
  const std::string device_ = "GPU-0";
};

TEST_F(StepTest, MessageAfterAnEarlyEndOfTheStepIsABreach) {
  Start(2);
  LayoutRequest request = Request(Spec(2));
  request.spec.on_gpu = true;
  request.device = "GPU-0";
  for (const std::uint32_t rank : {0u, 1u}) {
    const auto registered = job_->RegisterLayout(Of(rank), request);
    ASSERT_TRUE(registered.ok()) << registered.status();
    channel_ = registered->channel;
  }
  for (const std::uint32_t rank : {0u, 1u}) {
    const auto arena = std::make_shared<FakeDeviceArena>();
    const RankMemory memory{nullptr, nullptr, *SemaphorePage::Create(2), arena};
    ASSERT_TRUE(job_->ArenaMapped(Of(rank), channel_, memory).ok());
  }
  // Rank 0 is a step ahead of rank 1, and ends that step in each of the three ways.
  const std::string reason(1024, 'x');
  std::uint64_t step = 1;
  for (const int end : {0, 1, 2}) {
    ASSERT_TRUE(job_->FinishStep(Of(0), channel_, step, "").ok());
    ASSERT_TRUE(job_->MarkReady(Of(0), channel_, step + 1, {0, 1}).ok());
    const absl::Status ended = end == 0   ? job_->AbandonStep(Of(0), channel_, step + 1, reason)
                               : end == 1 ? job_->EndStep(Of(0), channel_, step + 1, "")
                                          : job_->FinishStep(Of(0), channel_, step + 1, "");
    EXPECT_TRUE(ended.ok()) << ended;
    for (const absl::Status& late : {job_->AbandonStep(Of(0), channel_, step + 1, reason),
                                     job_->EndStep(Of(0), channel_, step + 1, ""),
                                     job_->FinishStep(Of(0), channel_, step + 1, ""),
                                     job_->MarkReady(Of(0), channel_, step + 1, {})}) {
      EXPECT_EQ(ReasonOf(late), "PROTOCOL_VIOLATION");
      EXPECT_TRUE(Says(late, "after this rank had ended the step")) << late;
    }
    // Rank 1 gives both steps up.
    ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, step, "").ok());
    if (end > 0) {
      ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, step + 1, "").ok());
    }
    step += 2;
  }
  EXPECT_EQ(sink(1).Of<StepDoneMessage>().size(), 6u);
}

// ---- Void steps of many buckets: other users have turns while the words are written

TEST_F(StepTest, VoidStepOfManyBucketsEndsInTurns) {
  Start(2);
  channel_ = Agree(Spec(1500));
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {3}).ok());
  ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, 1, "no memory").ok());
  EXPECT_EQ(executor_.pending(), 4u) << "two turns for each rank";
  EXPECT_EQ(memory(0, channel_).done(0), 0u);
  executor_.RunNext();
  EXPECT_EQ(memory(0, channel_).void_step(), 1u);
  EXPECT_EQ(memory(0, channel_).done(1023), 1u);
  EXPECT_EQ(memory(0, channel_).done(1024), 0u);
  // The step is not decided yet. Messages about it have no effect any more.
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {4}).ok());
  ASSERT_TRUE(job_->EndStep(Of(1), channel_, 1, "").ok());
  executor_.RunNext();
  executor_.RunNext();
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(sink(rank).messages().empty());
  executor_.RunNext();
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(rank).record->verdict), "STEP_ABANDONED");
    for (std::size_t i = 0; i < 1500; ++i) ASSERT_EQ(memory(rank, channel_).done(i), 1u);
  }
  executor_.RunAll();
  TakeAll();
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 2);
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(1).record->verdict.ok());
  EXPECT_EQ(memory(1, channel_).done(1499), 2u);
}

TEST_F(StepTest, ReduceThreadDoesNotEndAVoidStepOfManyBuckets) {
  Start(2);
  channel_ = Agree(Spec(40));
  for (const std::uint32_t rank : {0u, 1u}) {
    ASSERT_TRUE(job_->MarkReady(Of(rank), channel_, 1, {0}).ok());
  }
  ASSERT_TRUE(job_->AbandonStep(Of(1), channel_, 1, "no memory").ok());
  EXPECT_EQ(executor_.pending(), 0u) << "the reduction is in flight";
  reducer_.CompleteAll();
  EXPECT_EQ(memory(0, channel_).done(0), 1u);
  EXPECT_EQ(memory(0, channel_).done(1), 0u);
  EXPECT_TRUE(sink(0).messages().empty());
  executor_.RunAll();
  EXPECT_EQ(memory(0, channel_).done(1), 1u);
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_ABANDONED");
}

TEST_F(StepTest, TickDoesNotEndAVoidStepOfManyBuckets) {
  Start(2);
  channel_ = Agree(Spec(40));
  ASSERT_TRUE(job_->MarkReady(Of(0), channel_, 1, {0}).ok());
  for (int i = 0; i < 2; ++i) {
    clock_.Advance(kStepTimeoutNs);
    job_->Tick();
    EXPECT_EQ(executor_.pending(), 2u) << "a step ends once";
  }
  EXPECT_EQ(memory(0, channel_).void_step(), 0u);
  executor_.RunAll();
  EXPECT_EQ(memory(1, channel_).void_step(), 1u);
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(1).record->verdict), "STEP_TIMEOUT");
}

TEST_F(StepTest, JobEndsAfterTheWordsOfItsVoidStep) {
  Start(2);
  channel_ = Agree(Spec(40));
  ASSERT_TRUE(job_->AbandonStep(Of(0), channel_, 1, "no memory").ok());
  executor_.RunNext();
  Lose(1);
  EXPECT_TRUE(sink(0).messages().empty());
  EXPECT_TRUE(memory(0, channel_).Shared()) << "the executor writes to it";
  executor_.RunAll();
  EXPECT_TRUE(sink(0).Of<StepDoneMessage>().empty());
  EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(0).status), "RANK_LOST");
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_FALSE(memory(rank, channel_).Shared());
}

}  // namespace
}  // namespace gradsync::daemon
