// How the ranks of a job agree on a layout before its first step.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class LayoutAgreementTest : public JobFixture {
 protected:
  // Takes the rank's next step: the first call registers, the second maps.
  void Advance(std::uint32_t rank) {
    if (++done_[rank] == 1) {
      channel_ = Register(rank, Spec(2));
    } else {
      const absl::Status mapped = Map(rank, channel_);
      EXPECT_TRUE(mapped.ok()) << mapped;
    }
  }
  bool Finished(std::uint32_t rank) const { return done_[rank] == 2; }

  void Restart(std::uint32_t ranks) {
    job_.reset();
    executor_.RunAll();
    sinks_.clear();
    memory_.clear();
    done_.assign(ranks, 0);
    Start(ranks);
  }

  std::vector<int> done_;
  std::uint32_t channel_ = 0;
};

TEST_F(LayoutAgreementTest, IsReachedWhenTheLastRankHasMappedInAnyOrder) {
  std::vector<std::uint32_t> order = {0, 0, 1, 1, 2, 2};
  int orders = 0;
  do {
    Restart(3);
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
      Advance(order[i]);
    }
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      ASSERT_EQ(sink(rank).messages().size(), 1u);
      const auto ready = Only<LayoutReadyMessage>(rank);
      EXPECT_EQ(ready.channel, channel_);
      EXPECT_EQ(ready.first_step, 1u);
      EXPECT_EQ(ready.fingerprint, job_->Snapshot().layouts[0].fingerprint);
    }
    ++orders;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 90);
}

TEST_F(LayoutAgreementTest, LossAtAnyPointEndsEverySessionAndFreesAllMemory) {
  std::vector<std::uint32_t> order = {0, 0, 1, 1, 2, 2};
  do {
    for (std::size_t deaths = 0; deaths <= order.size(); ++deaths) {
      for (std::uint32_t lost = 0; lost < 3; ++lost) {
        Restart(3);
        for (std::size_t i = 0; i < deaths; ++i) Advance(order[i]);
        TakeAll();
        Lose(lost);
        for (std::uint32_t rank = 0; rank < 3; ++rank) {
          ASSERT_EQ(sink(rank).messages().size(), 1u);
          const absl::Status end = Only<SessionEndMessage>(rank).status;
          EXPECT_EQ(end.code(), absl::StatusCode::kAborted);
          if (rank == lost) continue;
          EXPECT_EQ(ReasonOf(end), "RANK_LOST");
          EXPECT_EQ(FieldOf(end, "rank"), std::to_string(lost));
        }
        executor_.RunAll();
        for (const auto& ranks : memory_) {
          for (const auto& memory : ranks) EXPECT_TRUE(memory == nullptr || !memory->Shared());
        }
        EXPECT_TRUE(job_->Empty());
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(LayoutAgreementTest, LossErrorNamesTheLayoutBeingAgreed) {
  Start(2);
  Register(0, Spec(1, "generator"));
  Lose(1);
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "'generator' was being agreed"));
}

TEST_F(LayoutAgreementTest, MismatchErrorNamesParameterAndBothRanksToEveryRank) {
  Start(3);
  Register(0, Spec(2));
  Register(2, Spec(2));
  LayoutSpec other = Spec(2);
  other.parameters[1].shape = {4};
  const absl::Status refused = job_->RegisterLayout(Of(1), Request(other)).status();
  for (const absl::Status& status :
       {refused, Only<LayoutFailedMessage>(0).status, Only<LayoutFailedMessage>(2).status}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "LAYOUT_MISMATCH");
    EXPECT_TRUE(Says(status, "'model' differs between ranks 0 and 1")) << status;
    EXPECT_TRUE(Says(status,
                     "parameter 1: 'p1' float32 [2,2] on rank 0, 'p1' float32 [4] on rank "
                     "1"))
        << status;
    EXPECT_EQ(FieldOf(status, "rank"), "1");
    EXPECT_EQ(FieldOf(status, "other_rank"), "0");
  }
  EXPECT_EQ(Only<LayoutFailedMessage>(0).request_id, 40u);
  EXPECT_TRUE(sink(1).messages().empty());
}

TEST_F(LayoutAgreementTest, DifferentLastBucketCapIsAMismatch) {
  Start(2);
  Register(0, Spec(2));
  LayoutSpec other = Spec(2);
  other.last_bucket_cap_bytes = 4096;
  const absl::Status refused = job_->RegisterLayout(Of(1), Request(other)).status();
  for (const absl::Status& status : {refused, Only<LayoutFailedMessage>(0).status}) {
    EXPECT_EQ(ReasonOf(status), "LAYOUT_MISMATCH");
    EXPECT_TRUE(Says(status, "last_bucket_cap_bytes: 0 on rank 0, 4096 on rank 1")) << status;
  }
}

TEST_F(LayoutAgreementTest, MismatchLeavesTheJobRunningAndTheNameFree) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(2));
  EXPECT_TRUE(Map(0, channel).ok());
  ASSERT_FALSE(job_->RegisterLayout(Of(1), Request(Spec(3))).ok());
  executor_.RunAll();
  EXPECT_FALSE(memory(0, channel).Shared());

  // A mapping that was in flight is accepted.
  EXPECT_TRUE(Map(0, channel).ok());
  executor_.RunAll();
  EXPECT_FALSE(memory(0, channel).Shared());
  TakeAll();
  const std::uint32_t next = Agree(Spec(2));
  EXPECT_NE(next, channel);
  DoStep(0, next, 1);
  DoStep(1, next, 1);
  reducer_.CompleteAll();
  EXPECT_TRUE(Only<StepDoneMessage>(1).record->verdict.ok());
}

TEST_F(LayoutAgreementTest, StepBeforeTheAgreementIsRefused) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(2));
  for (const absl::Status& status :
       {job_->MarkReady(Of(0), channel, 1, {0}), job_->EndStep(Of(0), channel, 1, ""),
        job_->AbandonStep(Of(0), channel, 1, "")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "ARENA_NOT_POPULATED");
    EXPECT_TRUE(Says(status, "before LayoutReady")) << status;
  }
}

TEST_F(LayoutAgreementTest, SecondRegistrationOrMappingIsRefused) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(2));
  const absl::Status again = job_->RegisterLayout(Of(0), Request(Spec(2))).status();
  EXPECT_EQ(ReasonOf(again), "ALREADY_REGISTERED");
  EXPECT_TRUE(Says(again, "rank 0")) << again;
  EXPECT_TRUE(Map(0, channel).ok());
  EXPECT_EQ(ReasonOf(Map(0, channel)), "PROTOCOL_VIOLATION");
  EXPECT_EQ(ReasonOf(job_->ArenaMapped(Of(1), channel, {})), "PROTOCOL_VIOLATION");
  EXPECT_EQ(ReasonOf(job_->ArenaMapped(Of(1), 9, {})), "UNKNOWN_CHANNEL");
}

TEST_F(LayoutAgreementTest, EachLayoutHasItsOwnChannelStepsAndVerdicts) {
  Start(2);
  const std::uint32_t generator = Agree(Spec(1, "generator"));
  const std::uint32_t discriminator = Agree(Spec(2, "discriminator"));
  EXPECT_NE(generator, discriminator);
  DoStep(0, discriminator, 1);
  DoStep(0, generator, 1);
  DoStep(1, generator, 1);
  reducer_.CompleteAll();
  EXPECT_EQ(Only<StepDoneMessage>(0).channel, generator);
  TakeAll();
  ASSERT_TRUE(job_->AbandonStep(Of(1), discriminator, 1, "no memory").ok());
  const auto done = Only<StepDoneMessage>(0);
  EXPECT_EQ(done.channel, discriminator);
  EXPECT_EQ(ReasonOf(done.record->verdict), "STEP_ABANDONED");
  EXPECT_EQ(memory(0, generator).void_step(), 0u);
}

TEST_F(LayoutAgreementTest, TimeoutOfAHugeJobNamesFewRanks) {
  Start(300);
  ASSERT_TRUE(job_->RegisterLayout(Of(0), Request(Spec(1), clock_.NowNs() + 100)).ok());
  clock_.Advance(100);
  job_->Tick();
  const absl::Status status = Only<LayoutFailedMessage>(0).status;
  EXPECT_TRUE(Says(status,
                   "not registered by rank 1, 2, 3, 4, 5, 6, 7, 8, 291 more; not mapped by "
                   "rank 0."))
      << status;
  EXPECT_EQ(FieldOf(status, "rank"), "1");
}

TEST_F(LayoutAgreementTest, TimeoutNamesRanksThatHaveNotRegisteredOrMapped) {
  Start(4);
  const std::uint64_t deadline_ns = clock_.NowNs() + 100;
  const auto registered = job_->RegisterLayout(Of(0), Request(Spec(1), deadline_ns));
  ASSERT_TRUE(registered.ok());
  const std::uint32_t channel = Register(1, Spec(1));
  EXPECT_TRUE(Map(1, channel).ok());
  clock_.Advance(99);
  job_->Tick();
  EXPECT_TRUE(sink(0).messages().empty());
  clock_.Advance(1);
  job_->Tick();
  for (const std::uint32_t rank : {0, 1}) {
    const absl::Status status = Only<LayoutFailedMessage>(rank).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ReasonOf(status), "LAYOUT_TIMEOUT");
    EXPECT_TRUE(Says(status, "not registered by rank 2, 3")) << status;
    EXPECT_TRUE(Says(status, "not mapped by rank 0")) << status;
  }
  EXPECT_TRUE(sink(2).messages().empty());
  // The late rank gets the same answer. No rank gets it twice.
  const absl::Status late = job_->RegisterLayout(Of(2), Request(Spec(1))).status();
  EXPECT_EQ(ReasonOf(late), "LAYOUT_TIMEOUT");
  EXPECT_TRUE(Says(late, "This rank, 2, came too late.")) << late;
  clock_.Advance(1000);
  job_->Tick();
  EXPECT_EQ(sink(0).messages().size(), 1u);
  executor_.RunAll();
  EXPECT_FALSE(memory(1, channel).Shared());
}

TEST_F(LayoutAgreementTest, AgreedLayoutHasNoDeadline) {
  Start(1);
  const auto registered = job_->RegisterLayout(Of(0), Request(Spec(1), clock_.NowNs() + 100));
  ASSERT_TRUE(registered.ok());
  TrainerMemory memory(registered->plan.arena_bytes, 1);
  ASSERT_TRUE(job_->ArenaMapped(Of(0), registered->channel, memory.Share()).ok());
  TakeAll();
  clock_.Advance(1000);
  job_->Tick();
  EXPECT_TRUE(sink(0).messages().empty());
}

TEST_F(LayoutAgreementTest, DoesNotWaitForARankThatExits) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(1));
  EXPECT_TRUE(Map(0, channel).ok());
  EXPECT_TRUE(sink(0).messages().empty());
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/true).ok());
  Only<LayoutReadyMessage>(0);
  DoStep(0, channel, 1);
  reducer_.CompleteAll();
  const auto done = Only<StepDoneMessage>(0);
  EXPECT_EQ(done.record->live_ranks, 1u);
  EXPECT_EQ(done.record->divisor, 1u);
}

TEST_F(LayoutAgreementTest, FailsOnEveryRankWhenOneLeavesAndStays) {
  Start(3);
  const std::uint32_t channel = Register(0, Spec(1));
  EXPECT_TRUE(Map(0, channel).ok());
  Register(2, Spec(1));
  ASSERT_TRUE(job_->Leave(Of(2), /*exit=*/false).ok());
  for (const std::uint32_t rank : {0, 2}) {
    const absl::Status status = Only<LayoutFailedMessage>(rank).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "RANKS_LEFT");
    EXPECT_TRUE(Says(status, "layout 'model' cannot be agreed: rank 2 left")) << status;
  }
  ASSERT_TRUE(job_->Leave(Of(1), /*exit=*/false).ok());
  const absl::Status refused = job_->RegisterLayout(Of(0), Request(Spec(1))).status();
  EXPECT_EQ(ReasonOf(refused), "RANKS_LEFT");
  EXPECT_TRUE(Says(refused, "rank 2, 1 left")) << refused;
  executor_.RunAll();
  EXPECT_FALSE(memory(0, channel).Shared());
  // Once all ranks have left, they can agree again.
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
  TakeAll();
  Agree(Spec(1));
}

TEST_F(LayoutAgreementTest, RankThatHasLeftCannotRegister) {
  Start(2);
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
  const absl::Status status = job_->RegisterLayout(Of(0), Request(Spec(1))).status();
  EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(status, "rank 0 has left")) << status;
}

TEST_F(LayoutAgreementTest, MappingInFlightWhenTheRankLeavesIsAccepted) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(1));
  Register(1, Spec(1));
  ASSERT_TRUE(job_->Leave(Of(0), /*exit=*/false).ok());
  const absl::Status mapped = Map(0, channel);
  EXPECT_TRUE(mapped.ok()) << mapped;
  executor_.RunAll();
  EXPECT_FALSE(memory(0, channel).Shared());
}

TEST_F(LayoutAgreementTest, ReplacementThatGotNoMemoryMayRegisterAgain) {
  options_.on_rank_loss = OnRankLoss::kHold;
  options_.hold_timeout_ns = kForever;
  Start(2);
  const std::uint32_t channel = Agree(Spec(2));
  for (std::uint32_t rank = 0; rank < 2; ++rank) DoStep(rank, channel, 1);
  reducer_.CompleteAll();
  Lose(1);
  TakeAll();
  ASSERT_TRUE(Rejoin(1).ok());
  ASSERT_EQ(Register(1, Spec(2)), channel);
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = kept;
  job_->KeepMemory(Of(1), channel, std::move(kept));
  job_->RefuseLayout(Of(1), channel, absl::ResourceExhaustedError("quota"));
  executor_.RunAll();
  EXPECT_TRUE(watch.expired());
  for (std::uint32_t rank = 0; rank < 2; ++rank) EXPECT_TRUE(sink(rank).messages().empty());
  EXPECT_EQ(ReasonOf(Map(1, channel)), "PROTOCOL_VIOLATION") << "it has to register again";

  ASSERT_EQ(Register(1, Spec(2)), channel);
  ASSERT_TRUE(Map(1, channel).ok());
  EXPECT_EQ(Only<LayoutReadyMessage>(1).first_step, 2u);
  job_->RefuseLayout(Of(1), channel, absl::ResourceExhaustedError("late"));
  EXPECT_EQ(ReasonOf(job_->RegisterLayout(Of(1), Request(Spec(2))).status()), "ALREADY_REGISTERED")
      << "it has its memory";
}

}  // namespace
}  // namespace gradsync::daemon
