// Calls of a session that is no longer its rank's.

#include <gtest/gtest.h>

#include <memory>

#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

class RankSessionTest : public JobFixture {
 protected:
  RankSessionTest() {
    Start(2);
    channel_ = Agree(Spec(2));
  }

  // Every call that a session makes, for a session whose rank 0 is another one by now.
  void CallAll() {
    const RankSession old{0, Incarnation(0) - 1};
    EXPECT_FALSE(job_->RegisterLayout(old, Request(Spec(1, "late"))).ok());
    EXPECT_TRUE(job_->CheckReplaces(old, 99).ok());
    EXPECT_TRUE(job_->ArenaMapped(old, channel_, memory(0, channel_).Share()).ok());
    job_->RefuseLayout(old, channel_, absl::ResourceExhaustedError("no memory"));
    EXPECT_TRUE(job_->MarkReady(old, channel_, 1, {0}).ok());
    EXPECT_TRUE(job_->EndStep(old, channel_, 1, "").ok());
    EXPECT_TRUE(job_->FinishStep(old, channel_, 1, "").ok());
    EXPECT_TRUE(job_->AbandonStep(old, channel_, 1, "no memory").ok());
    EXPECT_TRUE(job_->Operate(old, 1, {}, {}, kForever).ok());
    EXPECT_TRUE(job_->ChunkWritten(old, 1, 0, 1).ok());
    EXPECT_TRUE(job_->ChunkRead(old, 1, 0).ok());
    EXPECT_TRUE(job_->BeginCollective(old, "barrier").ok());
    EXPECT_TRUE(job_->QueryCollectives(old, absl::Seconds(5)).ok());
    EXPECT_TRUE(job_->ReleaseLayout(old, channel_).ok());
    EXPECT_TRUE(job_->Leave(old, /*exit=*/true).ok());
    EXPECT_TRUE(job_->Finish(old).ok());
    job_->Lose(old, absl::AbortedError("its process has ended"));
    EXPECT_EQ(job_->StateOf(old), RankState::kLost);
  }

  std::uint32_t channel_ = 0;
};

TEST_F(RankSessionTest, CallsOfAnotherSessionChangeNothing) {
  CallAll();
  ASSERT_TRUE(job_->MarkReady(Of(1), channel_, 1, {0, 1}).ok());
  CallAll();
  EXPECT_EQ(job_->MissingInStep(channel_, 1),
            "rank 0 has not marked bucket 0-1 ready; rank 1 has not ended the step");
  EXPECT_EQ(reducer_.submitted(), 0u);
  for (const std::uint32_t rank : {0u, 1u}) EXPECT_TRUE(sink(rank).Take().empty());
  ASSERT_TRUE(job_->EndStep(Of(1), channel_, 1, "").ok());
  DoStep(0, channel_, 1);
  reducer_.CompleteAll();
  for (const std::uint32_t rank : {0u, 1u}) {
    EXPECT_TRUE(Only<StepDoneMessage>(rank).record->verdict.ok());
  }
}

TEST_F(RankSessionTest, MemoryOfAnotherSessionIsReleased) {
  auto memory = std::make_shared<int>();
  const std::weak_ptr<int> released = memory;
  job_->KeepMemory({0, Incarnation(0) - 1}, channel_, std::move(memory));
  executor_.RunAll();
  EXPECT_TRUE(released.expired());
}

}  // namespace
}  // namespace gradsync::daemon
