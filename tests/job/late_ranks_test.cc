// Which notices ranks that wait get about late ones, and when.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/job/late_ranks.h"
#include "daemon/job/membership.h"
#include "tests/job/job_fixture.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

class LateRanksTest : public JobFixture {
 protected:
  void Wait(std::uint64_t ns) {
    clock_.Advance(ns);
    job_->Tick();
  }
  // The rank's notices since the last call.
  std::vector<std::string> Notices(std::uint32_t rank) {
    std::vector<std::string> texts;
    for (const auto& notice : sink(rank).Of<StillWaitingMessage>()) texts.push_back(notice.text);
    sink(rank).Take();
    return texts;
  }
  StagingMemory Staging(std::uint32_t rank) {
    staging_.resize(sinks_.size());
    staging_[rank] = std::make_shared<std::vector<std::byte>>(64);
    return {staging_[rank], staging_[rank]->data(), staging_[rank]->size()};
  }
  absl::Status Operate(std::uint32_t rank, const OperationSpec& spec) {
    return job_->Operate(Of(rank), 1, spec, Staging(rank), kForever);
  }

  std::vector<std::shared_ptr<std::vector<std::byte>>> staging_;
};

using Texts = std::vector<std::string>;

TEST_F(LateRanksTest, AgreementNamesLateRanksAfterFiveSecondsAndThenEveryThirty) {
  Start(4, false, kStepTimeoutNs, /*absent=*/1);
  const std::uint32_t channel = Register(0, Spec(2));
  ASSERT_TRUE(Map(0, channel).ok());
  Register(1, Spec(2));
  job_->Tick();
  Wait(5 * kSecond - 1);
  EXPECT_EQ(Notices(0), Texts{});
  Wait(1);
  EXPECT_EQ(Notices(0), Texts{"layout 'model' after 5s: rank 1 has not mapped its memory; rank 2 "
                              "has not registered it; rank 3 has not joined the job"});
  ASSERT_TRUE(Map(1, channel).ok());
  Wait(30 * kSecond - 1);
  EXPECT_EQ(Notices(0), Texts{});
  Wait(1);
  const Texts second = {
      "layout 'model' after 35s: rank 2 has not registered it; rank 3 has not "
      "joined the job"};
  EXPECT_EQ(Notices(0), second);
  EXPECT_EQ(Notices(1), second);
  EXPECT_EQ(Notices(2), Texts{});  // it waits for nothing
  // A tick that comes late does not shift the later ones.
  Wait(45 * kSecond);
  EXPECT_EQ(Notices(0).size(), 1u);
  Wait(15 * kSecond);
  EXPECT_EQ(Notices(0).size(), 1u);
  EXPECT_EQ(logged_.size(), 4u);
  EXPECT_EQ(logged_[1], "run-7: " + second[0]);
}

TEST_F(LateRanksTest, NothingIsSaidOnceTheAgreementIsReachedOrHasFailed) {
  Start(2);
  const std::uint32_t channel = Register(0, Spec(1));
  ASSERT_TRUE(Map(0, channel).ok());
  job_->Tick();
  Wait(4 * kSecond);
  Register(1, Spec(1));
  ASSERT_TRUE(Map(1, channel).ok());
  const auto failing =
      job_->RegisterLayout(Of(0), Request(Spec(1, "other"), clock_.NowNs() + 6 * kSecond));
  ASSERT_TRUE(failing.ok());
  job_->Tick();
  Wait(6 * kSecond);
  Only<LayoutFailedMessage>(0);
  Wait(60 * kSecond);
  EXPECT_EQ(Notices(0), Texts{});
  EXPECT_EQ(Notices(1), Texts{});
  EXPECT_EQ(logged_, Texts{});
}

TEST_F(LateRanksTest, StepNamesWhatLateRanksHaveNotDoneToThoseThatHaveEndedIt) {
  Start(5, false, 60 * kSecond);
  const std::uint32_t channel = Agree(Spec(3));
  ASSERT_TRUE(job_->MarkReady(Of(1), channel, 1, {1}).ok());
  job_->Tick();
  Wait(6 * kSecond);
  EXPECT_EQ(Notices(1), Texts{});  // nobody waits yet
  DoStep(0, channel, 1);
  ASSERT_TRUE(job_->MarkReady(Of(4), channel, 1, {0, 1, 2}).ok());
  job_->Tick();
  Wait(5 * kSecond);
  EXPECT_EQ(Notices(0),
            Texts{"step 1 of layout 'model' after 5s: rank 1 has not marked bucket 0, 2 ready; "
                  "ranks 2, 3 have not begun it; rank 4 has not ended it"});
  for (const std::uint32_t rank : {1, 2, 3, 4}) EXPECT_EQ(Notices(rank), Texts{}) << rank;
  // The next step is another wait.
  ASSERT_TRUE(job_->AbandonStep(Of(1), channel, 1, "enough").ok());
  reducer_.CompleteAll();
  DoStep(0, channel, 2);
  TakeAll();
  job_->Tick();
  Wait(5 * kSecond - 1);
  EXPECT_EQ(Notices(0), Texts{});
  Wait(1);
  EXPECT_EQ(Notices(0),
            Texts{"step 2 of layout 'model' after 5s: ranks 1, 2, 3, 4 have not begun it"});
}

TEST_F(LateRanksTest, OperationNamesTheRanksThatHaveNotCalledIt) {
  Start(3, false, kStepTimeoutNs, /*absent=*/1);
  ASSERT_TRUE(Operate(0, {}).ok());
  job_->Tick();
  Wait(5 * kSecond);
  EXPECT_EQ(Notices(0), Texts{"operation 1 (barrier) after 5s: rank 1 has not called it; rank 2 "
                              "has not joined the job"});
  EXPECT_EQ(Notices(1), Texts{});
}

TEST_F(LateRanksTest, EachChunkOfABroadcastIsAWaitOfItsOwn) {
  Start(2);
  OperationSpec broadcast;
  broadcast.kind = OperationKind::kBroadcast;
  broadcast.root = 1;
  broadcast.bytes = 128;
  ASSERT_TRUE(Operate(0, broadcast).ok());
  ASSERT_TRUE(Operate(1, broadcast).ok());
  job_->Tick();
  Wait(4 * kSecond);
  ASSERT_TRUE(job_->ChunkWritten(Of(1), 1, 0, 64).ok());
  executor_.RunAll();
  ASSERT_TRUE(job_->ChunkRead(Of(0), 1, 0).ok());
  job_->Tick();
  Wait(4 * kSecond);
  EXPECT_EQ(Notices(0), Texts{});
  Wait(kSecond);
  EXPECT_EQ(Notices(0), Texts{"operation 1 (broadcast of 128 bytes from rank 1) after 5s: rank 1 "
                              "has not written its part"});
  ASSERT_TRUE(job_->ChunkWritten(Of(1), 1, 1, 64).ok());
  executor_.RunAll();
  TakeAll();
  Wait(30 * kSecond);
  EXPECT_EQ(Notices(0), Texts{});
  EXPECT_EQ(Notices(1), Texts{"operation 1 (broadcast of 128 bytes from rank 1) after 35s: rank 0 "
                              "has not read its part"});
}

TEST_F(LateRanksTest, QueryNamesTheRanksThatHaveBegunFewerCollectives) {
  Start(5, false, kStepTimeoutNs, /*absent=*/1);
  for (const std::uint32_t rank : {0, 1, 3}) {
    ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
  }
  ASSERT_TRUE(job_->BeginCollective(Of(0), "gather").ok());
  ASSERT_TRUE(job_->Leave(Of(3), /*exit=*/true).ok());
  ASSERT_TRUE(job_->QueryCollectives(Of(0), absl::Seconds(35)).ok());
  EXPECT_EQ(Notices(0), Texts{"a collective after 35s: rank 1 has not begun collective 2 (gather); "
                              "rank 2 has not begun collective 1 (barrier); rank 4 has not joined "
                              "the job"});
  ASSERT_TRUE(job_->QueryCollectives(Of(2), absl::Seconds(5)).ok());
  for (const std::uint32_t rank : {1, 2}) EXPECT_EQ(Notices(rank), Texts{}) << "nobody is late";
}

TEST_F(LateRanksTest, QueryNamesTheFirstEightOfManyDifferences) {
  Start(11);
  for (std::uint32_t rank = 0; rank < 10; ++rank) {
    for (std::uint32_t i = 0; i < rank; ++i) {
      ASSERT_TRUE(job_->BeginCollective(Of(rank), "barrier").ok());
    }
  }
  ASSERT_TRUE(job_->QueryCollectives(Of(9), absl::Seconds(5)).ok());
  const Texts texts = Notices(9);
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_TRUE(absl::StrContains(texts[0], "ranks 0, 10 have not begun collective 1 (barrier); "))
      << texts[0];
  EXPECT_TRUE(absl::EndsWith(texts[0], "; rank 7 has not begun collective 8 (barrier); ..."))
      << texts[0];
}

// A rank may ask for this text as often as it likes, with a few bytes.
TEST(NumberedLateRanksTest, HugeJobIsDescribedWithFewTexts) {
  constexpr std::uint32_t kRanks = 65'536;
  Membership members(kRanks);
  for (std::uint32_t rank = 1; rank < kRanks; ++rank) {
    members.Join(rank, /*incarnation=*/rank, nullptr, "");
  }
  LateRanks late(members);
  int described = 0;
  const auto done = [&described](std::uint64_t number) {
    ++described;
    return absl::StrCat("begun ", number);
  };
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) late.Add(rank, 1 + rank % 100, done);
  EXPECT_EQ(described, 7) << "the text names eight groups, and one of them has not joined";
  EXPECT_TRUE(absl::StartsWith(late.Text(),
                               "rank 0 has not joined the job; ranks 1, 101, 201, 301, 401, 501, "
                               "601, 701, 648 more have not begun 2; "))
      << late.Text();
  EXPECT_TRUE(absl::EndsWith(late.Text(), " have not begun 8; ...")) << late.Text();
}

TEST_F(LateRanksTest, ANoticeOfAHugeJobIsShort) {
  Start(300);
  ASSERT_TRUE(Operate(299, {}).ok());
  job_->Tick();
  Wait(5 * kSecond);
  EXPECT_EQ(Notices(299), Texts{"operation 1 (barrier) after 5s: ranks 0, 1, 2, 3, 4, 5, 6, 7, "
                                "291 more have not called it"});
}

}  // namespace
}  // namespace gradsync::daemon
