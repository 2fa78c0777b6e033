// Policy `hold` with `state_source` survivor: a replacement gets the state of the model from a
// survivor, and is admitted when every rank's digests agree.

#include "daemon/job/state_healing.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kHoldTimeoutNs = 600'000'000'000;
constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::size_t kStagingBytes = 64;

using Digests = std::vector<StateDigest>;

StateDigest Item(const std::string& name, char of) { return {name, std::string(32, of)}; }
// What every rank has.
Digests Same() { return {Item("weight", 'a'), Item("momentum", 'b')}; }

class StateHealingTest : public JobFixture {
 protected:
  StateHealingTest() {
    options_.on_rank_loss = OnRankLoss::kHold;
    options_.state_source = StateSource::kSurvivor;
    options_.hold_timeout_ns = kHoldTimeoutNs;
  }

  // A job of `ranks` ranks that has completed step 1 of a layout of two buckets.
  void Begin(std::uint32_t ranks) {
    Start(ranks, /*divide_by_world=*/false, /*step_timeout_ns=*/kForever / 4);
    channel_ = Agree(Spec(2));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) DoStep(rank, channel_, 1);
    reducer_.CompleteAll();
    TakeAll();
  }
  // Every rank of these ends step `step`.
  void End(const std::vector<std::uint32_t>& ranks, std::uint64_t step) {
    for (const std::uint32_t rank : ranks) DoStep(rank, channel_, step);
  }
  // The rank's next session joins and maps its memory.
  void Return(std::uint32_t rank) {
    const absl::Status joined = Rejoin(rank);
    ASSERT_TRUE(joined.ok()) << joined;
    ASSERT_EQ(Register(rank, Spec(2)), channel_);
    const absl::Status mapped = Map(rank, channel_);
    ASSERT_TRUE(mapped.ok()) << mapped;
    EXPECT_EQ(job_->StateOf(rank), RankState::kLoading);
  }
  StagingMemory Staging(std::uint32_t rank) {
    auto& window = windows_[Of(rank).incarnation];
    if (window == nullptr) window = std::make_shared<std::vector<std::byte>>(kStagingBytes);
    return {window, window->data(), kStagingBytes};
  }
  absl::Status Fetch(std::uint32_t rank, std::uint64_t timeout_ns = 0) {
    return job_->FetchState(Of(rank), Staging(rank), timeout_ns);
  }
  // Begins a job of `ranks` ranks. Rank 1 is lost in step 2, which the others end. Its replacement
  // asks for the state.
  void BeginTransfer(std::uint32_t ranks = 3) {
    Begin(ranks);
    Lose(1);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      if (rank != 1) End({rank}, 2);
    }
    Return(1);
    TakeAll();
    ASSERT_TRUE(Fetch(1).ok());
    source_ = 0;
    ASSERT_TRUE(Asked(0, /*offer=*/true));
  }
  // Rank 1 comes back and asks for the state; rank 2 is the only one that has ended the step.
  void FetchFromRank2() {
    Return(1);
    TakeAll();
    ASSERT_TRUE(Fetch(1).ok());
    source_ = 2;
    ASSERT_TRUE(Asked(2, /*offer=*/true));
  }
  // True if the rank was asked. `offer`: for the state, in a new transfer, which becomes the
  // present one. Otherwise for its digests, in the present one.
  bool Asked(std::uint32_t rank, bool offer) {
    const auto questions = sink(rank).Of<StateQuestionMessage>();
    if (questions.empty() || questions.back().offer != offer) return false;
    if (questions.back().transfer != (offer ? transfer_ + 1 : transfer_)) return false;
    transfer_ = questions.back().transfer;
    return true;
  }
  bool Cancelled(std::uint32_t rank) {
    const auto cancelled = sink(rank).Of<StateCancelledMessage>();
    return cancelled.size() == 1 && cancelled.back().transfer == transfer_;
  }
  absl::Status Offer(std::uint64_t bytes) {
    return job_->OfferState(Of(source_), transfer_, bytes, Staging(source_));
  }
  absl::Status Written(std::uint64_t chunk) {
    return job_->StateWritten(Of(source_), transfer_, chunk);
  }
  absl::Status Read(std::uint32_t rank, std::uint64_t chunk) {
    return job_->StateRead(Of(rank), transfer_, chunk);
  }
  absl::Status Send(std::uint32_t rank, const Digests& digests) {
    return job_->TakeDigests(Of(rank), transfer_, digests);
  }
  // The source's and the replacement's part of a transfer of these bytes. Returns what came.
  std::string Move(std::uint32_t replacement, const std::string& state) {
    std::string came;
    EXPECT_TRUE(Offer(state.size()).ok());
    EXPECT_EQ(Only<StateBeginMessage>(replacement).bytes, state.size());
    EXPECT_EQ(Only<StateBeginMessage>(replacement).source, source_);
    for (std::uint64_t chunk = 0; came.size() < state.size(); ++chunk) {
      const auto write = sink(source_).Of<StateChunkMessage>();
      if (write.empty()) break;
      EXPECT_TRUE(write.back().write);
      EXPECT_EQ(write.back().chunk, chunk);
      state.copy(reinterpret_cast<char*>(Staging(source_).data), write.back().bytes, came.size());
      EXPECT_TRUE(Written(chunk).ok());
      executor_.RunAll();
      const auto read = sink(replacement).Of<StateChunkMessage>();
      if (read.empty()) break;
      EXPECT_FALSE(read.back().write);
      EXPECT_EQ(read.back().chunk, chunk);
      came.append(reinterpret_cast<const char*>(Staging(replacement).data), read.back().bytes);
      EXPECT_TRUE(Read(replacement, chunk).ok());
    }
    return came;
  }
  // The replacement gets the state, and everyone of `asked` has the same digests.
  void Heal(std::uint32_t replacement, const std::vector<std::uint32_t>& asked) {
    EXPECT_EQ(Move(replacement, "state"), "state");
    for (const std::uint32_t rank : asked) EXPECT_TRUE(Send(rank, Same()).ok());
    EXPECT_TRUE(Send(replacement, Same()).ok());
    EXPECT_EQ(Only<StateAdmittedMessage>(replacement).transfer, transfer_);
    EXPECT_EQ(job_->StateOf(replacement), RankState::kHealing);
  }
  void ExpectComplete(const std::vector<std::uint32_t>& ranks) {
    reducer_.CompleteAll();
    executor_.RunAll();
    reducer_.CompleteAll();
    executor_.RunAll();
    for (const std::uint32_t rank : ranks) {
      const auto done = Only<StepDoneMessage>(rank);
      ASSERT_NE(done.record, nullptr);
      EXPECT_TRUE(done.record->verdict.ok()) << done.record->verdict;
    }
    TakeAll();
  }

  std::uint32_t channel_ = 0;
  std::uint32_t source_ = 0;
  std::uint64_t transfer_ = 0;
  std::map<std::uint64_t, std::shared_ptr<std::vector<std::byte>>> windows_;  // by incarnation
};

// ---- A transfer

TEST_F(StateHealingTest, ReplacementGetsTheStateInChunksAndCompletesTheStep) {
  BeginTransfer();
  EXPECT_TRUE(Asked(2, /*offer=*/false));
  std::string state;
  for (int i = 0; i < 150; ++i) state.push_back(static_cast<char>(i));
  EXPECT_EQ(Move(1, state), state);
  for (const std::uint32_t rank : {0u, 2u, 1u}) {
    EXPECT_TRUE(sink(1).Of<StateAdmittedMessage>().empty()) << "before rank " << rank;
    EXPECT_TRUE(Send(rank, Same()).ok());
  }
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_);
  TakeAll();
  End({1}, 2);
  ExpectComplete({0, 1, 2});
  EXPECT_EQ(job_->StateOf(1), RankState::kLive);
}

// A rank may send a message of an earlier transfer meanwhile, and be charged for that one alone.
TEST_F(StateHealingTest, DigestsAreChargedUntilTheTransferHasEnded) {
  ArenaQuota quota(1000);
  BeginTransfer();
  EXPECT_TRUE(Asked(2, /*offer=*/false));
  EXPECT_EQ(Move(1, "state"), "state");
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_TRUE(
        job_->TakeDigests(Of(rank), transfer_, Same(), *quota.Reserve(Tenant(7), 100)).ok());
    if (rank != 1) continue;
    EXPECT_EQ(quota.total_bytes(), 200u) << "one survivor's, and the replacement's";
  }
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_);
  EXPECT_EQ(quota.total_bytes(), 0u);
}

TEST_F(StateHealingTest, AnyRankMayBeLostAndTheLowestFrozenRankIsTheSource) {
  Begin(3);
  Lose(0);
  End({1, 2}, 2);
  Return(0);
  ASSERT_TRUE(Fetch(0).ok());
  source_ = 1;
  ASSERT_TRUE(Asked(1, /*offer=*/true));
  ASSERT_TRUE(Asked(2, /*offer=*/false));
  Heal(0, {1, 2});
  TakeAll();
  End({0}, 2);
  ExpectComplete({0, 1, 2});
}

TEST_F(StateHealingTest, MarksBeforeAdmissionAreRefusedAndTheRankIsHeldAgain) {
  BeginTransfer();
  const absl::Status marked = job_->MarkReady(Of(1), channel_, 2, {0});
  EXPECT_EQ(ReasonOf(marked), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(marked, "StateAdmitted")) << marked;
  EXPECT_EQ(ReasonOf(job_->EndStep(Of(1), channel_, 2, "")), "PROTOCOL_VIOLATION");
  EXPECT_EQ(ReasonOf(job_->FinishStep(Of(1), channel_, 2, "")), "PROTOCOL_VIOLATION");
  EXPECT_EQ(ReasonOf(job_->AbandonStep(Of(1), channel_, 2, "")), "PROTOCOL_VIOLATION");
  job_->Lose(Of(1), marked);
  EXPECT_EQ(job_->StateOf(1), RankState::kHeld);
  EXPECT_FALSE(job_->HasEnded());
}

// Otherwise it would count as a source: ranks that have left have the state.
TEST_F(StateHealingTest, RankThatLoadsDoesNotLeave) {
  Begin(3);
  Lose(1);
  Lose(2);
  for (const std::uint32_t rank : {1u, 2u}) Return(rank);
  for (const absl::Status& left : {job_->Leave(Of(1), /*exit=*/true), job_->Finish(Of(2))}) {
    EXPECT_EQ(ReasonOf(left), "PROTOCOL_VIOLATION");
    EXPECT_TRUE(Says(left, "does not have the state of the model yet")) << left;
  }
}

TEST_F(StateHealingTest, SourceThatComputesIsReplacedByOneThatHasEndedTheStep) {
  Begin(3);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0, 1}).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true)) << "it may wait for a bucket";
  End({2}, 2);
  EXPECT_TRUE(Cancelled(0));
  source_ = 2;
  ASSERT_TRUE(Asked(2, /*offer=*/true));
  EXPECT_TRUE(Asked(0, /*offer=*/false));
  const std::size_t questions = sink(0).Of<StateQuestionMessage>().size();
  EXPECT_TRUE(job_->EndStep(Of(0), channel_, 2, "").ok());
  EXPECT_EQ(sink(0).Of<StateQuestionMessage>().size(), questions);
  Heal(1, {2, 0});
}

TEST_F(StateHealingTest, SourceThatHasOfferedStaysTheSource) {
  Begin(3);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0, 1}).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(Offer(5).ok());
  End({2}, 2);
  EXPECT_FALSE(Cancelled(0));
  EXPECT_TRUE(Asked(2, /*offer=*/false));
}

// Each of them waits for a bucket that the replacement has to mark.
TEST_F(StateHealingTest, SurvivorsThatWaitForABucketHealTheReplacement) {
  Begin(3);
  Lose(1);
  for (const std::uint32_t rank : {0u, 2u}) {
    EXPECT_TRUE(job_->MarkReady(Of(rank), channel_, 2, {0, 1}).ok());
  }
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  ASSERT_TRUE(Asked(2, /*offer=*/false));
  clock_.Advance(2 * StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_FALSE(Cancelled(0)) << "it may compute";
  Heal(1, {0, 2});
  TakeAll();
  End({1}, 2);
  for (const std::uint32_t rank : {0u, 2u}) {
    EXPECT_TRUE(job_->EndStep(Of(rank), channel_, 2, "").ok());
  }
  ExpectComplete({0, 1, 2});
}

TEST_F(StateHealingTest, TimeOfASourceThatComputesBeginsWithItsEndStep) {
  Begin(2);
  Lose(1);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0, 1}).ok());
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  clock_.Advance(2 * StateHealing::kSilenceNs);
  EXPECT_TRUE(job_->EndStep(Of(0), channel_, 2, "").ok());
  clock_.Advance(StateHealing::kSilenceNs - 1);
  job_->Tick();
  EXPECT_FALSE(Cancelled(0));
  clock_.Advance(1);
  job_->Tick();
  EXPECT_TRUE(Cancelled(0));
}

TEST_F(StateHealingTest, RankIsAskedAtItsFirstMarkAndAwaited) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  FetchFromRank2();
  EXPECT_TRUE(sink(0).Of<StateQuestionMessage>().empty())
      << "it may still wait for step 1, with the state before";
  EXPECT_EQ(Move(1, "state"), "state");
  EXPECT_TRUE(Send(2, Same()).ok());
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/false));
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading) << "rank 0 has not answered";
  EXPECT_TRUE(Send(0, Same()).ok());
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_);
}

// The only rank that was frozen differs from the others.
TEST_F(StateHealingTest, StateOfTheOnlyFrozenRankIsNotTrustedAlone) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  FetchFromRank2();
  Move(1, "state");
  for (const std::uint32_t rank : {1u, 2u}) EXPECT_TRUE(Send(rank, {Item("weight", 'x')}).ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  EXPECT_TRUE(job_->FinishStep(Of(0), channel_, 2, "").ok());
  EXPECT_TRUE(Send(0, Same()).ok());
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANKS_DIVERGED");
  EXPECT_TRUE(Says(end, "ranks 2 and 0")) << end;
}

TEST_F(StateHealingTest, TimeForDigestsBeginsWhenTheRankWaits) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  FetchFromRank2();
  Move(1, "state");
  for (const std::uint32_t rank : {1u, 2u}) EXPECT_TRUE(Send(rank, Same()).ok());
  clock_.Advance(10 * StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading) << "rank 0 still computes";
  EXPECT_TRUE(job_->FinishStep(Of(0), channel_, 2, "").ok());
  clock_.Advance(StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  clock_.Advance(StateHealing::kHashNsPerByte * 5);
  job_->Tick();
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_);
}

TEST_F(StateHealingTest, LateAnswerOfARankThatIsNotComparedIsIgnored) {
  Begin(5);
  Lose(1);
  End({0, 2}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(4), channel_, 2, {0}).ok());
  Return(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Move(1, "state");
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(Send(rank, Same()).ok());
  clock_.Advance(2 * StateHealing::kSilenceNs);
  job_->Tick();  // rank 2 is not compared, rank 3 has not begun the step, and rank 4 computes
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  EXPECT_TRUE(Send(2, Same()).ok());
  EXPECT_TRUE(job_->RefuseState(Of(2), transfer_, "late").ok());
  EXPECT_FALSE(Cancelled(0));
  EXPECT_EQ(job_->RefuseState(Of(3), transfer_, "early").code(),
            absl::StatusCode::kFailedPrecondition);
}

// It may validate.
TEST_F(StateHealingTest, RankThatHasNotBegunTheStepIsNotAwaited) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  FetchFromRank2();
  Heal(1, {2});
}

TEST_F(StateHealingTest, RankThatNeverEndsTheStepIsAwaitedForHoldTimeout) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  FetchFromRank2();
  Move(1, "state");
  for (const std::uint32_t rank : {1u, 2u}) EXPECT_TRUE(Send(rank, Same()).ok());
  job_->Tick();
  clock_.Advance(kHoldTimeoutNs - 1);
  job_->Tick();
  EXPECT_FALSE(job_->HasEnded());
  clock_.Advance(1);
  job_->Tick();
  EXPECT_TRUE(Says(Only<SessionEndMessage>(0).status, "within hold_timeout"));
}

TEST_F(StateHealingTest, RankThatWasAdmittedInThisStepIsNotAwaited) {
  Begin(3);
  for (const std::uint32_t lost : {1u, 2u}) Lose(lost);
  End({0}, 2);
  for (const std::uint32_t lost : {1u, 2u}) Return(lost);
  for (const std::uint32_t lost : {1u, 2u}) ASSERT_TRUE(Fetch(lost).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  EXPECT_TRUE(job_->MarkReady(Of(1), channel_, 2, {0}).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(sink(1).Of<StateQuestionMessage>().empty()) << "it computes, and was compared";
  sink(0).Take();
  Heal(2, {0});
}

// It has left, and rank 2 still saves its work.
TEST_F(StateHealingTest, RankThatHasNotLeftIsNotAwaitedByThoseThatHave) {
  Begin(3);
  EXPECT_TRUE(job_->Leave(Of(0), true).ok());
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
}

TEST_F(StateHealingTest, RankOfAnotherLayoutsStepIsNotFrozen) {
  Begin(2);
  const std::uint32_t other = Agree(Spec(1, "other"));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, other, 1);
  reducer_.CompleteAll();
  TakeAll();
  Lose(1);
  Return(1);
  ASSERT_EQ(Register(1, Spec(1, "other")), other);
  ASSERT_TRUE(Map(1, other).ok());
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(job_->MarkReady(Of(0), other, 2, {0}).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  DoStep(0, channel_, 2);
  clock_.Advance(StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_FALSE(Cancelled(0)) << "it may compute in the other layout's step";
  EXPECT_TRUE(job_->EndStep(Of(0), other, 2, "").ok());
  clock_.Advance(StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_TRUE(Cancelled(0));
}

// Its replacement would begin after a step of one layout whose averages it never gets.
TEST_F(StateHealingTest, LossBetweenTheEndsOfTwoStepsThatRunAtOnceEndsTheJob) {
  for (const bool begun_before : {true, false}) {
    SCOPED_TRACE(begun_before);
    sinks_.clear();
    memory_.clear();
    Begin(2);
    const std::uint32_t other = Agree(Spec(1, "other"));
    for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, other, 1);
    reducer_.CompleteAll();
    TakeAll();
    DoStep(1, channel_, 2);
    if (begun_before) {
      EXPECT_TRUE(job_->MarkReady(Of(0), other, 2, {0}).ok());
    }
    Lose(1);
    EXPECT_EQ(job_->HasEnded(), begun_before);
    EXPECT_TRUE(job_->MarkReady(Of(0), other, 2, {0}).ok());
    const absl::Status end = Only<SessionEndMessage>(0).status;
    EXPECT_EQ(ReasonOf(end), "RANK_LOST");
    EXPECT_TRUE(Says(end, "steps 2 of layout 'model' and 2 of layout 'other'")) << end;
  }
}

TEST_F(StateHealingTest, RankLostAfterItsEndStepIsHealedInTheNextStep) {
  Begin(2);
  End({1}, 2);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  End({0}, 2);
  EXPECT_TRUE(sink(0).Of<StateQuestionMessage>().empty()) << "step 2 is not its step";
  ExpectComplete({0});
  End({0}, 3);
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  TakeAll();
  End({1}, 3);
  ExpectComplete({0, 1});
}

// Rank 1 is live before rank 0 has mapped the second layout, and its barrier goes on without rank
// 0.
TEST_F(StateHealingTest, RanksThatBeginWithTheSameStepBeginWithTheSameOperation) {
  Begin(2);
  const std::uint32_t other = Agree(Spec(1, "other"));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, other, 1);
  reducer_.CompleteAll();
  const auto return_to_other = [&](std::uint32_t rank) {
    ASSERT_EQ(Register(rank, Spec(1, "other")), other);
    ASSERT_TRUE(Map(rank, other).ok());
  };
  const auto call_barrier = [&](std::uint32_t rank) {
    TakeAll();
    const absl::Status called = job_->Operate(Of(rank), 1, OperationSpec(), {}, kForever);
    EXPECT_TRUE(called.ok()) << called;
    EXPECT_EQ(Only<OperationDoneMessage>(rank).sequence, 1u);
  };
  Lose(1);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0, 1}).ok());
  Return(1);
  return_to_other(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  End({1}, 2);
  reducer_.CompleteAll();
  Lose(0);
  Return(0);
  TakeAll();
  ASSERT_TRUE(Fetch(0).ok());
  source_ = 1;
  ASSERT_TRUE(Asked(1, /*offer=*/true));
  Heal(0, {1});
  End({0}, 2);
  executor_.RunAll();
  reducer_.CompleteAll();
  executor_.RunAll();
  EXPECT_EQ(Only<HealedMessage>(1).next_sequence, 1u);
  EXPECT_EQ(job_->StateOf(0), RankState::kHealing);
  call_barrier(1);
  return_to_other(0);
  EXPECT_EQ(Only<HealedMessage>(0).next_sequence, 1u);
  call_barrier(0);
}

TEST_F(StateHealingTest, ReplacementsAreServedOneAfterTheOther) {
  Begin(3);
  for (const std::uint32_t lost : {1u, 2u}) Lose(lost);
  End({0}, 2);
  for (const std::uint32_t lost : {1u, 2u}) Return(lost);
  for (const std::uint32_t lost : {2u, 1u}) ASSERT_TRUE(Fetch(lost).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_EQ(job_->Snapshot().healing->rank, 2u);
  Heal(2, {0});
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_EQ(job_->Snapshot().healing->rank, 1u);
  EXPECT_TRUE(sink(2).Of<StateQuestionMessage>().empty());
  End({2}, 2);
  EXPECT_TRUE(Asked(2, /*offer=*/false)) << "it has the state now, and does not change it";
  Heal(1, {0, 2});
  TakeAll();
  End({1}, 2);
  ExpectComplete({0, 1, 2});
}

TEST_F(StateHealingTest, ReplacementThatCannotBeServedYetDoesNotBlockAnother) {
  Begin(3);
  End({1}, 2);
  Lose(1);
  Lose(2);
  Return(1);
  Return(2);
  ASSERT_TRUE(Fetch(1).ok());  // it needs the state of step 3
  ASSERT_TRUE(Fetch(2).ok());
  End({0}, 2);
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_EQ(job_->Snapshot().healing->rank, 2u);
  Heal(2, {0});
  TakeAll();
  End({2}, 2);
  ExpectComplete({0, 2});
  End({0, 2}, 3);
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_EQ(job_->Snapshot().healing->rank, 1u);
  EXPECT_TRUE(Asked(2, /*offer=*/false));
}

TEST_F(StateHealingTest, RepeatedFetchBeginsAgain) {
  BeginTransfer();
  EXPECT_TRUE(Offer(100).ok());
  sink(0).Take();
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(Cancelled(1));
  ASSERT_TRUE(Asked(0, /*offer=*/true));
}

// ---- Digests

TEST_F(StateHealingTest, ReplacementWithAnotherStateEndsAlone) {
  BeginTransfer();
  Move(1, "state");
  for (const std::uint32_t rank : {0u, 2u}) EXPECT_TRUE(Send(rank, Same()).ok());
  const std::size_t told = sink(0).messages().size();
  EXPECT_TRUE(Send(1, {Item("weight", 'a'), Item("momentum", 'x')}).ok());
  const absl::Status end = Only<SessionEndMessage>(1).status;
  EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(end), "RANKS_DIVERGED");
  EXPECT_EQ(FieldOf(end, "rank"), "1");
  EXPECT_EQ(FieldOf(end, "other_rank"), "0");
  EXPECT_TRUE(Says(end, "'momentum' differs")) << end;
  EXPECT_EQ(job_->StateOf(1), RankState::kHeld);
  EXPECT_FALSE(job_->HasEnded());
  EXPECT_EQ(sink(0).messages().size(), told);
  Return(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0, 2});
}

TEST_F(StateHealingTest, ReplacementIsNotJudgedBeforeEveryLivingRankHasAnswered) {
  BeginTransfer();
  Move(1, "state");
  EXPECT_TRUE(Send(0, Same()).ok());
  EXPECT_TRUE(Send(1, {Item("weight", 'x')}).ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  EXPECT_TRUE(Send(2, {Item("weight", 'x')}).ok());
  EXPECT_TRUE(job_->HasEnded()) << "ranks 0 and 2 differ";
}

TEST_F(StateHealingTest, LivingRanksWithDifferentStatesEndTheJob) {
  BeginTransfer();
  EXPECT_TRUE(Send(2, Same()).ok());
  EXPECT_TRUE(Send(0, {Item("weight", 'x'), Item("momentum", 'y')}).ok());
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    const absl::Status end = Only<SessionEndMessage>(rank).status;
    EXPECT_EQ(ReasonOf(end), "RANKS_DIVERGED");
    EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(Says(end, "ranks 2 and 0")) << end;
    EXPECT_TRUE(Says(end, "'weight' differs")) << "the first item: " << end;
  }
}

TEST_F(StateHealingTest, FirstDifferenceIsNamed) {
  struct Case {
    Digests digests;
    std::string says;
  };
  const Case cases[] = {
      {{Item("weight", 'a'), Item("momentum", 'c')}, "'momentum' differs"},
      {{Item("weight", 'a'), Item("step", 'b')},
       "item 1 is 'momentum' on rank 0, 'step' on rank 1"},
      {{Item("weight", 'a')}, "'momentum' is only on rank 0"},
      {{Item("weight", 'a'), Item("momentum", 'b'), Item("rng", 'c')}, "'rng' is only on rank 1"},
      {{}, "'weight' is only on rank 0"},
  };
  BeginTransfer(2);
  for (const Case& one : cases) {
    Move(1, "state");
    EXPECT_TRUE(Send(0, Same()).ok());
    EXPECT_TRUE(Send(1, one.digests).ok());
    const absl::Status end = Only<SessionEndMessage>(1).status;
    EXPECT_TRUE(Says(end, one.says)) << end;
    Return(1);
    TakeAll();
    ASSERT_TRUE(Fetch(1).ok());
    ASSERT_TRUE(Asked(0, /*offer=*/true));
  }
}

// ---- A transfer that ends early

// Where a transfer is.
struct Stage {
  const char* name;
  bool told;  // the replacement has got StateBegin
};
constexpr Stage kStages[] = {{"offering", false},
                             {"writing", true},
                             {"copying", true},
                             {"reading", true},
                             {"loading", true}};

class StageTest : public StateHealingTest, public testing::WithParamInterface<Stage> {
 protected:
  // The transfer of BeginTransfer() comes to the stage. Removes the messages so far.
  void Reach() {
    BeginTransfer();
    const std::string stage = GetParam().name;
    const std::function<absl::Status()> moves[] = {[this] { return Offer(5); },
                                                   [this] { return Written(0); },
                                                   [this] {
                                                     executor_.RunAll();
                                                     return absl::OkStatus();
                                                   },
                                                   [this] { return Read(1, 0); }};
    for (std::size_t i = 0; stage != kStages[i].name; ++i) ASSERT_TRUE(moves[i]().ok());
    TakeAll();
  }
};

TEST_P(StageTest, AnotherRankIsTheSourceIfTheFirstOneIsLost) {
  Reach();
  Lose(0);
  EXPECT_EQ(Cancelled(1), GetParam().told);
  EXPECT_TRUE(Cancelled(2));
  if (std::string(GetParam().name) == "copying") {
    EXPECT_TRUE(sink(2).Of<StateQuestionMessage>().empty()) << "its memory is still written to";
  }
  executor_.RunAll();
  source_ = 2;
  ASSERT_TRUE(Asked(2, /*offer=*/true));
  EXPECT_TRUE(sink(1).Of<StateChunkMessage>().empty()) << "the copy was of the earlier transfer";
  Heal(1, {2});
  EXPECT_FALSE(job_->HasEnded());
}

TEST_P(StageTest, LossOfAnAskedRankBeginsAgain) {
  Reach();
  Lose(2);
  EXPECT_TRUE(Cancelled(0));
  EXPECT_EQ(Cancelled(1), GetParam().told);
  executor_.RunAll();
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
}

TEST_P(StageTest, VoidStepCancelsTheTransfer) {
  Begin(4);
  Lose(1);
  End({0, 2}, 2);
  Return(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  const std::string stage = GetParam().name;
  if (stage != "offering") {
    EXPECT_TRUE(Offer(5).ok());
  }
  if (stage == "copying" || stage == "reading" || stage == "loading") {
    EXPECT_TRUE(Written(0).ok());
  }
  if (stage == "reading" || stage == "loading") executor_.RunAll();
  if (stage == "loading") {
    EXPECT_TRUE(Read(1, 0).ok());
  }
  TakeAll();
  EXPECT_TRUE(job_->AbandonStep(Of(3), channel_, 2, "out of memory").ok());
  EXPECT_TRUE(Cancelled(0));
  EXPECT_TRUE(Cancelled(2));
  EXPECT_EQ(Cancelled(1), GetParam().told);
  executor_.RunAll();
  EXPECT_TRUE(sink(0).Of<StateQuestionMessage>().empty()) << "its state changes now";
  // Late messages of that transfer change nothing.
  EXPECT_TRUE(Offer(7).ok());
  EXPECT_TRUE(Written(0).ok());
  EXPECT_TRUE(Read(1, 0).ok());
  EXPECT_TRUE(Send(0, Same()).ok());
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_TRUE(job_->RefuseState(Of(0), transfer_, "late").ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  TakeAll();
  End({0, 2, 3}, 3);
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0, 2, 3});
}

TEST_P(StageTest, LostReplacementIsHeldAgainAndTheNextOneIsServed) {
  Reach();
  Lose(1);
  EXPECT_EQ(job_->StateOf(1), RankState::kHeld);
  EXPECT_TRUE(Cancelled(0));
  EXPECT_TRUE(Cancelled(2));
  Return(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  executor_.RunAll();
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0, 2});
}

TEST_P(StageTest, EndOfTheJobCancelsAndWaitsForTheCopy) {
  Reach();
  job_->End(absl::UnavailableError("the daemon drains"));
  EXPECT_TRUE(Cancelled(0));
  EXPECT_EQ(Cancelled(1), GetParam().told);
  const bool copies = std::string(GetParam().name) == "copying";
  EXPECT_EQ(job_->Empty(), !copies);
  executor_.RunAll();
  EXPECT_TRUE(job_->Empty());
  for (const std::uint32_t rank : {0u, 1u, 2u}) Only<SessionEndMessage>(rank);
}

INSTANTIATE_TEST_SUITE_P(Each, StageTest, testing::ValuesIn(kStages),
                         [](const auto& stage) { return std::string(stage.param.name); });

TEST_F(StateHealingTest, VoidStepCancelsTheTransferBeforeItsReductionsEnd) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_TRUE(job_->MarkReady(Of(rank), channel_, 2, {0}).ok());
  }
  Lose(1);
  EXPECT_TRUE(job_->FinishStep(Of(0), channel_, 2, "").ok());
  Return(1);
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(job_->AbandonStep(Of(2), channel_, 2, "out of memory").ok());
  EXPECT_TRUE(Cancelled(0));
  reducer_.CompleteAll();
  EXPECT_EQ(sink(0).Of<StateQuestionMessage>().size(), 1u);
}

TEST_F(StateHealingTest, RequestTimesOut) {
  struct Case {
    std::function<void()> reach;
    std::string says;
  };
  const Case cases[] = {
      {[] {}, "rank 0 has not offered its state"},
      {[this] { EXPECT_TRUE(Offer(5).ok()); }, "rank 0 has not written chunk 0"},
      {[this] {
         EXPECT_TRUE(Offer(5).ok());
         EXPECT_TRUE(Written(0).ok());
       },
       "chunk 0 is being copied"},
      {[this] {
         EXPECT_TRUE(Offer(5).ok());
         EXPECT_TRUE(Written(0).ok());
         executor_.RunAll();
       },
       "this rank has not read chunk 0"},
      {[this] { Move(1, "state"); }, "no digests of rank 0, 2, 1"},
      {[this] {
         Move(1, "state");
         for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(Send(rank, Same()).ok());
       },
       "no digests of rank 2"},
  };
  BeginTransfer();
  for (const Case& one : cases) {
    TakeAll();
    ASSERT_TRUE(Fetch(1, kSecondNs).ok());
    ASSERT_TRUE(Asked(0, /*offer=*/true));
    sink(0).Take();
    one.reach();
    clock_.Advance(kSecondNs - 1);
    job_->Tick();
    EXPECT_TRUE(sink(1).Of<StateFailedMessage>().empty()) << one.says;
    clock_.Advance(1);
    job_->Tick();
    const absl::Status failed = Only<StateFailedMessage>(1).status;
    EXPECT_EQ(failed.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ReasonOf(failed), "STATE_UNAVAILABLE");
    EXPECT_TRUE(Says(failed, one.says)) << failed;
    EXPECT_TRUE(Cancelled(0));
    EXPECT_EQ(job_->StateOf(1), RankState::kLoading) << "it may fetch again";
    executor_.RunAll();
  }
}

TEST_F(StateHealingTest, RequestTimesOutBeforeAnyRankIsFrozen) {
  Begin(2);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1, kSecondNs).ok());
  clock_.Advance(kSecondNs);
  job_->Tick();
  const absl::Status failed = Only<StateFailedMessage>(1).status;
  EXPECT_TRUE(Says(failed, "no rank that has the state has begun the step")) << failed;
  End({0}, 2);
  EXPECT_TRUE(sink(0).Of<StateQuestionMessage>().empty()) << "nobody asks any more";
}

// The survivors validate, and nobody waits.
TEST_F(StateHealingTest, RequestWithoutTimeoutLastsWhileNoRankWaits) {
  Begin(2);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  clock_.Advance(10 * kHoldTimeoutNs);
  job_->Tick();
  EXPECT_TRUE(sink(1).Of<StateFailedMessage>().empty());
  EXPECT_FALSE(job_->HasEnded());
  End({0}, 2);
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  End({1}, 2);
  ExpectComplete({0, 1});
}

TEST_F(StateHealingTest, SourceThatRefusesIsReplacedUntilNoneIsLeft) {
  BeginTransfer();
  EXPECT_TRUE(job_->RefuseState(Of(0), transfer_, "a tensor is on a GPU").ok());
  EXPECT_TRUE(Cancelled(0));
  EXPECT_TRUE(sink(1).messages().empty()) << "it knows of no transfer";
  source_ = 2;
  ASSERT_TRUE(Asked(2, /*offer=*/true));
  EXPECT_TRUE(job_->RefuseState(Of(2), transfer_, "no memory").ok());
  const absl::Status failed = Only<StateFailedMessage>(1).status;
  EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(failed), "STATE_UNAVAILABLE");
  EXPECT_TRUE(Says(failed, "rank 0 cannot read its state: a tensor is on a GPU")) << failed;
  EXPECT_TRUE(Says(failed, "rank 2 cannot read its state: no memory")) << failed;
  EXPECT_FALSE(job_->Snapshot().healing.has_value());
  EXPECT_FALSE(job_->HasEnded());
  TakeAll();
  ASSERT_TRUE(Fetch(1).ok());
  source_ = 0;
  ASSERT_TRUE(Asked(0, /*offer=*/true)) << "it may do better now";
  Heal(1, {0, 2});
}

TEST_F(StateHealingTest, RankThatRefusedDoesNotReplaceASourceThatComputes) {
  Begin(4);
  Lose(1);
  End({2}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0, 1}).ok());
  FetchFromRank2();
  EXPECT_TRUE(job_->RefuseState(Of(2), transfer_, "no").ok());
  source_ = 0;
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  TakeAll();
  EXPECT_TRUE(job_->MarkReady(Of(3), channel_, 2, {0, 1}).ok());
  EXPECT_FALSE(Cancelled(0));
  EXPECT_TRUE(job_->EndStep(Of(0), channel_, 2, "").ok());
  Heal(1, {0, 3});
}

TEST_F(StateHealingTest, RankThatRefusedIsNotAskedForDigests) {
  BeginTransfer();
  EXPECT_TRUE(job_->RefuseState(Of(0), transfer_, "no").ok());
  source_ = 2;
  ASSERT_TRUE(Asked(2, /*offer=*/true));
  EXPECT_EQ(sink(0).Of<StateQuestionMessage>().size(), 1u);
  Heal(1, {2});
}

TEST_P(StageTest, SilentSourceIsReplaced) {
  Reach();
  clock_.Advance(StateHealing::kSilenceNs - 1);
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<StateCancelledMessage>().empty());
  clock_.Advance(1);
  job_->Tick();
  const std::string stage = GetParam().name;
  const bool owes = stage == "offering" || stage == "writing";
  EXPECT_TRUE(sink(1).Of<StateFailedMessage>().empty());
  EXPECT_EQ(Cancelled(0), owes);
  EXPECT_EQ(Cancelled(1), owes && GetParam().told);
  if (!owes) return;
  source_ = 2;
  ASSERT_TRUE(Asked(2, /*offer=*/true));
  EXPECT_TRUE(sink(0).Of<StateQuestionMessage>().empty());
  Heal(1, {2});
}

TEST_F(StateHealingTest, TimeOfTheReplacementIsNotTheSourcesSilence) {
  BeginTransfer();
  EXPECT_TRUE(Offer(2 * kStagingBytes).ok());
  clock_.Advance(StateHealing::kSilenceNs - 1);
  EXPECT_TRUE(Written(0).ok());
  clock_.Advance(10 * StateHealing::kSilenceNs);
  executor_.RunAll();  // the copy took that long
  TakeAll();
  clock_.Advance(StateHealing::kSilenceNs - 1);
  job_->Tick();
  EXPECT_TRUE(sink(0).messages().empty());
  EXPECT_TRUE(sink(1).messages().empty()) << "its time for the chunk has just begun";
  EXPECT_TRUE(Read(1, 0).ok());
  clock_.Advance(StateHealing::kSilenceNs - 1);
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<StateCancelledMessage>().empty()) << "its time began with this chunk";
}

// Two replacements wait. The transfer to rank 2 has begun; rank 1 is next.
class SlowReplacementTest : public StateHealingTest {
 protected:
  SlowReplacementTest() {
    Begin(3);
    for (const std::uint32_t lost : {1u, 2u}) Lose(lost);
    End({0}, 2);
    for (const std::uint32_t lost : {1u, 2u}) Return(lost);
    for (const std::uint32_t lost : {2u, 1u}) EXPECT_TRUE(Fetch(lost).ok());
    EXPECT_TRUE(Asked(0, /*offer=*/true));
  }
  // Rank 2 does nothing more. Its request fails after this time, rank 1 is served, and then rank 2
  // if it asks again.
  void ExpectFailure(std::uint64_t patience_ns, const std::string& says) {
    clock_.Advance(patience_ns - 1);
    job_->Tick();
    EXPECT_TRUE(sink(2).Of<StateFailedMessage>().empty());
    clock_.Advance(1);
    job_->Tick();
    const absl::Status failed = Only<StateFailedMessage>(2).status;
    EXPECT_EQ(failed.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ReasonOf(failed), "STATE_UNAVAILABLE");
    EXPECT_EQ(FieldOf(failed, "rank"), "2");
    EXPECT_TRUE(Says(failed, says)) << failed;
    EXPECT_TRUE(Cancelled(0));
    EXPECT_TRUE(Cancelled(2));
    ASSERT_TRUE(Asked(0, /*offer=*/true));
    EXPECT_TRUE(sink(1).Of<StateFailedMessage>().empty());
    Heal(1, {0});
    EXPECT_EQ(job_->StateOf(2), RankState::kLoading);
    TakeAll();
    ASSERT_TRUE(Fetch(2).ok());
    ASSERT_TRUE(Asked(0, /*offer=*/true));
    Heal(2, {0});
  }
};

TEST_F(SlowReplacementTest, ThatLeavesAChunkUnreadDoesNotBlockTheNextOne) {
  EXPECT_TRUE(Offer(5).ok());
  EXPECT_TRUE(Written(0).ok());
  executor_.RunAll();
  ExpectFailure(StateHealing::kLoadNs + 5 * StateHealing::kHashNsPerByte,
                "rank 2 of job 'run-7' has not read chunk 0");
}

TEST_F(SlowReplacementTest, ThatLeavesALaterChunkUnreadIsFailedSooner) {
  EXPECT_TRUE(Offer(kStagingBytes + 5).ok());
  for (const std::uint64_t chunk : {0u, 1u}) {
    EXPECT_TRUE(Written(chunk).ok());
    executor_.RunAll();
    if (chunk == 0) {
      EXPECT_TRUE(Read(2, 0).ok());
    }
  }
  ExpectFailure(StateHealing::kSilenceNs, "rank 2 of job 'run-7' has not read chunk 1");
}

TEST_F(SlowReplacementTest, ThatSendsNoDigestsDoesNotBlockTheNextOne) {
  Move(2, "state");
  ExpectFailure(StateHealing::kLoadNs + 5 * StateHealing::kHashNsPerByte,
                "rank 2 of job 'run-7' has read the state of the model, and has not confirmed it");
}

TEST_F(StateHealingTest, ReplacementThatHasConfirmedIsNotSlow) {
  BeginTransfer();
  Move(1, "state");
  EXPECT_TRUE(Send(1, Same()).ok());
  clock_.Advance(StateHealing::kLoadNs);
  // Nobody ticks while the others hash.
  EXPECT_TRUE(Send(0, Same()).ok());
  job_->Tick();
  EXPECT_TRUE(sink(1).Of<StateFailedMessage>().empty());
}

TEST_F(StateHealingTest, SinkThatRefusesIsHeldAgain) {
  BeginTransfer();
  Move(1, "state");
  const absl::Status refused = job_->RefuseState(Of(1), transfer_, "no such parameter");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), "STATE_REFUSED");
  EXPECT_TRUE(Says(refused, "cannot load the state that rank 0 gave it: no such parameter"))
      << refused;
  job_->Lose(Of(1), refused);
  EXPECT_EQ(job_->StateOf(1), RankState::kHeld);
  EXPECT_FALSE(job_->HasEnded());
  EXPECT_TRUE(Cancelled(0));
}

TEST_F(StateHealingTest, AskedRankThatRefusesIsNotCompared) {
  BeginTransfer();
  EXPECT_TRUE(job_->RefuseState(Of(2), transfer_, "a lock is held").ok());
  EXPECT_FALSE(Cancelled(0)) << "the transfer goes on";
  EXPECT_EQ(sink(2).Of<StateQuestionMessage>().size(), 1u) << "it is not asked again";
  Heal(1, {0});
  EXPECT_FALSE(job_->HasEnded());
}

TEST_F(StateHealingTest, AskedRankThatSendsNoDigestsIsNotCompared) {
  BeginTransfer();
  Move(1, "state");
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_TRUE(Send(0, Same()).ok());
  clock_.Advance(StateHealing::kSilenceNs);
  job_->Tick();
  EXPECT_TRUE(sink(1).Of<StateAdmittedMessage>().empty()) << "hashing may take a while";
  clock_.Advance(StateHealing::kHashNsPerByte * 5);
  job_->Tick();
  EXPECT_EQ(sink(1).Of<StateAdmittedMessage>().size(), 1u);
}

TEST_F(StateHealingTest, SourceThatSendsNoDigestsIsReplaced) {
  BeginTransfer();
  Move(1, "state");
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_TRUE(Send(2, Same()).ok());
  clock_.Advance(StateHealing::kSilenceNs + StateHealing::kHashNsPerByte * 5);
  job_->Tick();
  EXPECT_TRUE(Cancelled(0));
  EXPECT_TRUE(Asked(2, /*offer=*/true));
}

// The next source is among those that are silent, too.
TEST_F(StateHealingTest, SilentSourceIsReplacedBeforeOthersAreGivenUp) {
  Begin(3);
  Lose(1);
  End({2}, 2);
  FetchFromRank2();
  End({0}, 2);
  ASSERT_TRUE(Asked(0, /*offer=*/false));
  Move(1, "state");
  EXPECT_TRUE(Send(1, Same()).ok());
  clock_.Advance(StateHealing::kSilenceNs + StateHealing::kHashNsPerByte * 5);
  job_->Tick();
  EXPECT_TRUE(Cancelled(2));
  EXPECT_TRUE(Asked(0, /*offer=*/true));
}

// ---- Breaches of the protocol

TEST_F(StateHealingTest, BreachesAreNamed) {
  struct Case {
    std::string name;
    std::function<absl::Status()> send;
  };
  BeginTransfer();
  const Case cases[] = {
      {"fetch of a live rank", [this] { return Fetch(0); }},
      {"offer of another rank",
       [this] { return job_->OfferState(Of(2), transfer_, 5, Staging(2)); }},
      {"chunk before the offer", [this] { return Written(0); }},
      {"read before a chunk", [this] { return Read(1, 0); }},
      {"digests of the replacement before it has read", [this] { return Send(1, Same()); }},
      {"a transfer that has not begun",
       [this] { return job_->OfferState(Of(0), transfer_ + 1, 5, Staging(0)); }},
      {"transfer 0", [this] { return job_->TakeDigests(Of(0), 0, Same()); }},
      {"second offer",
       [this] {
         EXPECT_TRUE(Offer(2 * kStagingBytes).ok());
         return Offer(5);
       }},
      {"another chunk", [this] { return Written(1); }},
      {"chunk of the replacement", [this] { return job_->StateWritten(Of(1), transfer_, 0); }},
      {"chunk written twice",
       [this] {
         EXPECT_TRUE(Written(0).ok());
         executor_.RunAll();
         return Written(0);
       }},
      {"chunk read by another rank", [this] { return job_->StateRead(Of(2), transfer_, 0); }},
      {"another chunk read", [this] { return Read(1, 1); }},
      {"more chunks than were offered",
       [this] {
         EXPECT_TRUE(Read(1, 0).ok());
         EXPECT_TRUE(Written(1).ok());
         executor_.RunAll();
         EXPECT_TRUE(Read(1, 1).ok());
         return Written(2);
       }},
      {"digests twice",
       [this] {
         EXPECT_TRUE(Send(0, Same()).ok());
         return Send(0, Same());
       }},
  };
  for (const Case& one : cases) {
    const absl::Status status = one.send();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << one.name;
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION") << one.name << ": " << status;
  }
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_TRUE(Send(2, Same()).ok());
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_) << "the transfer went on";
}

// ConfirmState may be repeated after a time-out.
TEST_F(StateHealingTest, LastDigestsOfAReplacementCount) {
  BeginTransfer();
  EXPECT_EQ(Move(1, "state"), "state");
  EXPECT_TRUE(Send(1, {Item("weight", 'a'), Item("momentum", 'x')}).ok());
  EXPECT_TRUE(Send(0, Same()).ok());
  EXPECT_TRUE(Send(1, Same()).ok());
  EXPECT_TRUE(Send(2, Same()).ok());
  EXPECT_EQ(Only<StateAdmittedMessage>(1).transfer, transfer_);
}

TEST_F(StateHealingTest, FetchThatCrossesTheAdmissionChangesNothing) {
  BeginTransfer();
  Heal(1, {0, 2});
  EXPECT_TRUE(Fetch(1).ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kHealing);
  EXPECT_FALSE(job_->Snapshot().healing.has_value());
  DoStep(1, channel_, 2);
  TakeAll();
  ExpectComplete({0, 1, 2});
  EXPECT_EQ(ReasonOf(Fetch(1)), "PROTOCOL_VIOLATION") << "it is live";
}

TEST_F(StateHealingTest, MessagesNeedTheSourceSurvivor) {
  options_.state_source = StateSource::kTrainer;
  Begin(2);
  Lose(1);
  ASSERT_TRUE(Rejoin(1).ok());
  EXPECT_EQ(job_->StateOf(1), RankState::kHealing);
  const absl::Status fetched = Fetch(1);
  EXPECT_EQ(ReasonOf(fetched), "PROTOCOL_VIOLATION");
  EXPECT_TRUE(Says(fetched, "state_source=survivor")) << fetched;
  for (const absl::Status& status :
       {job_->OfferState(Of(0), 1, 5, Staging(0)), job_->StateWritten(Of(0), 1, 0),
        job_->StateRead(Of(1), 1, 0), job_->TakeDigests(Of(0), 1, Same()),
        job_->RefuseState(Of(0), 1, "")}) {
    EXPECT_EQ(ReasonOf(status), "PROTOCOL_VIOLATION");
  }
}

TEST_F(StateHealingTest, MessagesOfALostSessionAreIgnored) {
  BeginTransfer();
  const RankSession old = Of(1);
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(job_->FetchState(old, {}, 0).ok());
  EXPECT_TRUE(job_->StateRead(old, 99, 0).ok());
  EXPECT_TRUE(job_->TakeDigests(old, 99, {}).ok());
  EXPECT_TRUE(job_->RefuseState(old, 99, "").ok());
}

// ---- Who has the state

TEST_F(StateHealingTest, AdmittedRankHasTheState) {
  Begin(2);
  Lose(1);
  EXPECT_TRUE(job_->MarkReady(Of(0), channel_, 2, {0}).ok());
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  EXPECT_TRUE(job_->FinishStep(Of(0), channel_, 2, "").ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  Lose(0);
  EXPECT_FALSE(job_->HasEnded()) << "rank 1 has the state";
  Return(0);
  TakeAll();
  ASSERT_TRUE(Fetch(0).ok());
  End({1}, 2);
  EXPECT_TRUE(sink(1).Of<StateQuestionMessage>().empty()) << "rank 0 had ended step 2";
  ExpectComplete({1});
  End({1}, 3);
  source_ = 1;
  ASSERT_TRUE(Asked(1, /*offer=*/true));
  Heal(0, {1});
  TakeAll();
  End({0}, 3);
  ExpectComplete({0, 1});
}

TEST_F(StateHealingTest, AdmittedRankIsASourceBeforeItIsLive) {
  Begin(3);
  Lose(1);
  End({0}, 2);
  EXPECT_TRUE(job_->MarkReady(Of(2), channel_, 2, {0}).ok());
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0, 2});
  End({1}, 2);
  EXPECT_EQ(job_->StateOf(1), RankState::kHealing) << "rank 2 has not ended the step";
  Lose(2);
  Return(2);
  ASSERT_TRUE(Fetch(2).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(Asked(1, /*offer=*/false));
  Lose(0);
  source_ = 1;
  ASSERT_TRUE(Asked(1, /*offer=*/true));
  Heal(2, {1});
}

TEST_F(StateHealingTest, AverageOutlivesTheSessionsThatContributedToIt) {
  Begin(2);
  for (const std::uint32_t rank : {0u, 1u}) {
    memory(rank, channel_).At<float>(0)[0] = rank == 0 ? 1 : 3;
    ASSERT_TRUE(job_->MarkReady(Of(rank), channel_, 2, {0}).ok());
  }
  reducer_.CompleteAll();
  ASSERT_TRUE(job_->FinishStep(Of(0), channel_, 2, "").ok());
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  const auto lost = std::move(memory_[channel_ - 1][0]);
  Lose(0);
  executor_.RunAll();
  EXPECT_TRUE(lost->Shared()) << "rank 1 needs the average of bucket 0";
  TakeAll();
  DoStep(1, channel_, 2);
  ExpectComplete({1});
  EXPECT_EQ(memory(1, channel_).At<float>(0)[0], 2);
  executor_.RunAll();
  EXPECT_FALSE(lost->Shared());
}

TEST_F(StateHealingTest, LossOfTheLastRankThatHasTheStateEndsTheJob) {
  BeginTransfer(2);
  Lose(0);
  EXPECT_TRUE(job_->HasEnded());
  EXPECT_TRUE(Says(Only<SessionEndMessage>(1).status, "no other rank has the state"));
}

TEST_F(StateHealingTest, RanksThatHaveLeftAreSourcesBetweenSteps) {
  Begin(3);
  for (const std::uint32_t rank : {0u, 2u}) EXPECT_TRUE(job_->Leave(Of(rank), true).ok());
  Lose(1);
  EXPECT_FALSE(job_->HasEnded());
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(Asked(2, /*offer=*/false));
  Heal(1, {0, 2});
  EXPECT_TRUE(job_->Leave(Of(1), true).ok());
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_TRUE(Only<SessionEndMessage>(rank).status.ok());
  }
}

TEST_F(StateHealingTest, StepThatBeginsWhileTheSourceHasLeftEndsTheJob) {
  Begin(3);
  EXPECT_TRUE(job_->Leave(Of(0), true).ok());
  Lose(1);
  Return(1);
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  EXPECT_TRUE(job_->MarkReady(Of(2), channel_, 2, {0}).ok());
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    EXPECT_EQ(ReasonOf(Only<SessionEndMessage>(rank).status), "RANK_FINISHED") << rank;
  }
}

// ---- A rank that loads, and everything else

TEST_F(StateHealingTest, RankThatLoadsIsHeldWhateverEndsItsSession) {
  BeginTransfer();
  job_->Lose(Of(1), MakeError(absl::StatusCode::kAborted, reason::kStreamEnded,
                              "its connection was closed"));
  EXPECT_EQ(job_->StateOf(1), RankState::kHeld);
  EXPECT_FALSE(job_->HasEnded());
  job_->Lose(Of(2), MakeError(absl::StatusCode::kAborted, reason::kStreamEnded,
                              "its connection was closed"));
  EXPECT_TRUE(job_->HasEnded()) << "its process may write to gradients";
}

TEST_F(StateHealingTest, RankThatLoadsIsInNoOperation) {
  BeginTransfer();
  TakeAll();
  const OperationSpec barrier;
  EXPECT_EQ(ReasonOf(job_->Operate(Of(1), 1, barrier, {}, kForever)), "PROTOCOL_VIOLATION");
  for (const std::uint32_t rank : {0u, 2u}) {
    EXPECT_TRUE(job_->Operate(Of(rank), 1, barrier, {}, kForever).ok());
  }
  EXPECT_EQ(Only<OperationDoneMessage>(0).sequence, 1u);
  OperationSpec sum;
  sum.kind = OperationKind::kAllReduce;
  sum.dtype = DataType::kFloat32;
  sum.count = 1;
  EXPECT_TRUE(job_->Operate(Of(0), 2, sum, Staging(0), kForever).ok());
  EXPECT_TRUE(job_->HasEnded()) << "half a sum is never returned";
}

TEST_F(StateHealingTest, NoLayoutIsAgreedWhileARankLoads) {
  BeginTransfer();
  const auto registered = job_->RegisterLayout(Of(0), Request(Spec(1, "other")));
  EXPECT_EQ(ReasonOf(registered.status()), "RANKS_LEFT");
}

TEST_F(StateHealingTest, DeadlineOfTheStepIsSuspendedUntilAdmission) {
  Start(2, /*divide_by_world=*/false, /*step_timeout_ns=*/kSecondNs);
  channel_ = Agree(Spec(2));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, channel_, 1);
  reducer_.CompleteAll();
  Lose(1);
  End({0}, 2);
  Return(1);
  TakeAll();
  clock_.Advance(2 * kSecondNs);
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<StepDoneMessage>().empty());
  ASSERT_TRUE(Fetch(1).ok());
  ASSERT_TRUE(Asked(0, /*offer=*/true));
  Heal(1, {0});
  clock_.Advance(kSecondNs - 1);
  job_->Tick();
  EXPECT_TRUE(sink(0).Of<StepDoneMessage>().empty());
  clock_.Advance(1);
  job_->Tick();
  EXPECT_EQ(ReasonOf(Only<StepDoneMessage>(0).record->verdict), "STEP_TIMEOUT");
}

TEST_F(StateHealingTest, HoldTimeoutRunsWhileARankLoads) {
  BeginTransfer(2);
  job_->Tick();
  Move(1, "state");
  clock_.Advance(kHoldTimeoutNs);
  job_->Tick();
  const absl::Status end = Only<SessionEndMessage>(0).status;
  EXPECT_EQ(ReasonOf(end), "RANK_LOST");
  EXPECT_TRUE(Says(end, "did not get the state of the model within hold_timeout")) << end;
}

TEST_F(StateHealingTest, DrainDoesNotWaitForARankThatLoads) {
  BeginTransfer(2);
  EXPECT_TRUE(job_->EndIfIdle(absl::UnavailableError("drains")));
}

TEST_F(StateHealingTest, WaitingRanksHearOfARankThatLoads) {
  BeginTransfer(2);
  Move(1, "state");
  job_->Tick();
  clock_.Advance(6 * kSecondNs);
  job_->Tick();
  EXPECT_TRUE(absl::StrContains(Only<StillWaitingMessage>(0).text,
                                "rank 1 has not loaded the state of the model"))
      << Only<StillWaitingMessage>(0).text;
}

TEST_F(StateHealingTest, SnapshotShowsTheProgress) {
  BeginTransfer();
  JobSnapshot snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.ranks[1].state, RankState::kLoading);
  ASSERT_TRUE(snapshot.healing.has_value());
  EXPECT_EQ(snapshot.healing->rank, 1u);
  EXPECT_EQ(snapshot.healing->source, 0u);
  EXPECT_EQ(snapshot.healing->bytes, 0u);
  EXPECT_TRUE(Offer(100).ok());
  EXPECT_TRUE(Written(0).ok());
  executor_.RunAll();
  EXPECT_TRUE(Read(1, 0).ok());
  snapshot = job_->Snapshot();
  EXPECT_EQ(snapshot.healing->bytes, 100u);
  EXPECT_EQ(snapshot.healing->bytes_moved, kStagingBytes);
}

TEST_F(StateHealingTest, ReplacementGetsTheLayouts) {
  Begin(2);
  const std::uint32_t other = Agree(Spec(1, "other"));
  for (const std::uint32_t rank : {0u, 1u}) DoStep(rank, other, 1);
  reducer_.CompleteAll();
  Lose(1);
  EXPECT_TRUE(job_->CurrentLayouts(Of(0)).empty()) << "it is no replacement";
  ASSERT_TRUE(Rejoin(1).ok());
  const std::vector<CurrentLayout> layouts = job_->CurrentLayouts(Of(1));
  ASSERT_EQ(layouts.size(), 2u);
  EXPECT_EQ(layouts[0].spec->name, "model");
  EXPECT_EQ(layouts[0].spec->parameters.size(), 2u);
  EXPECT_EQ(layouts[0].step, 2u);
  EXPECT_EQ(layouts[1].spec->name, "other");
  EXPECT_EQ(job_->CurrentLayouts(Of(1))[0].spec, layouts[0].spec) << "it is shared";
}

TEST_F(StateHealingTest, OnlyOneReplacementWithTheSameOptionsJoins) {
  Begin(2);
  Lose(1);
  const auto join = [this](std::uint32_t world_size, const JobOptions& options) {
    return job_->Join(1, world_size, options, 999, std::make_shared<RecordingSink>());
  };
  EXPECT_EQ(ReasonOf(join(3, options_)), "JOB_MISMATCH");
  JobOptions trainer = options_;
  trainer.state_source = StateSource::kTrainer;
  const absl::Status differs = join(2, trainer);
  EXPECT_EQ(ReasonOf(differs), "JOB_MISMATCH");
  EXPECT_TRUE(Says(differs, "state_source is trainer")) << differs;
  Return(1);
  EXPECT_EQ(ReasonOf(join(2, options_)), "RANK_OCCUPIED");
  EXPECT_EQ(job_->StateOf(1), RankState::kLoading);
  job_->End(absl::UnavailableError("over"));
  EXPECT_EQ(join(2, options_).code(), absl::StatusCode::kAlreadyExists) << "the job is over";
}

TEST_F(StateHealingTest, SessionThatWouldBeHeldIsKnown) {
  Begin(2);
  EXPECT_TRUE(job_->WouldHold(Of(1)));
  EXPECT_FALSE(job_->WouldHold({1, 9999})) << "not its session";
  EXPECT_TRUE(job_->Leave(Of(0), true).ok());
  EXPECT_FALSE(job_->WouldHold(Of(0))) << "it has left";
  EXPECT_TRUE(job_->WouldHold(Of(1))) << "rank 0 has the state";
  job_->End(absl::UnavailableError("over"));
  EXPECT_FALSE(job_->WouldHold(Of(1)));
}

// ---- Huge jobs

TEST_F(StateHealingTest, SearchForTheSourcesOfManyReplacementsIsCutIntoShortOnes) {
  constexpr std::uint32_t kRanks = 1024;
  constexpr std::uint32_t kLost = 512;  // the lowest ranks
  const JobTerms terms;
  Membership members(kRanks);
  StateHealing healing(terms, &members, [] {});
  const auto sink = std::make_shared<RecordingSink>();
  DeferredActions actions;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    members.Join(rank, Incarnation(rank), sink, "");
    if (rank >= kLost) continue;
    members.Hold(rank, absl::AbortedError("lost"), &actions);
    members.Join(rank, Incarnation(rank) + kRanks, sink, "", /*loads=*/true);
    ASSERT_TRUE(healing.Fetch(rank, {}, StateHealing::kNoDeadline, &actions).ok());
  }
  bool begun = false;
  std::size_t looks = 0;
  const auto standing = [&](std::uint32_t rank, std::uint32_t replacement) {
    ++looks;
    if (rank < kLost) return StateHealing::Standing::kNone;
    const bool source = begun && rank == kRanks - 1 && replacement == kLost - 1;
    return source ? StateHealing::Standing::kFrozen : StateHealing::Standing::kHasState;
  };
  const auto update = [&] {
    looks = 0;
    EXPECT_TRUE(healing.Update(standing, /*now_ns=*/1, &actions).ok());
    EXPECT_LE(looks, StateHealing::kLooksAtOnce + 2 * kRanks);
  };
  update();
  EXPECT_FALSE(healing.Snapshot().has_value());
  begun = true;
  // Each call looks for one replacement at least.
  for (std::uint32_t i = 0; i < kLost && !healing.Snapshot().has_value(); ++i) update();
  const auto snapshot = healing.Snapshot();
  ASSERT_TRUE(snapshot.has_value());
  EXPECT_EQ(snapshot->rank, kLost - 1);
  EXPECT_EQ(snapshot->source, kRanks - 1);
}

}  // namespace
}  // namespace gradsync::daemon
