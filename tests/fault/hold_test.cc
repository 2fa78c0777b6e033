// Policy `hold` with real processes: a rank is killed, the others wait without an error, and
// another process takes its place.

#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

constexpr char kHold[] = "policy=hold state=trainer";
constexpr std::uint32_t kRanks = 3;
constexpr std::size_t kVictim = 1;

class HoldTest : public testing::Test {
 protected:
  explicit HoldTest(const std::vector<std::string>& flags = {}) : daemon_(flags) {}

  // Step 1 is complete: from here on a lost rank can be replaced.
  void Begin(const std::string& options = kHold) {
    trainers_ = JoinedTrainers(daemon_, kRanks, "job", options);
    ExpectAll(trainers_, "register buckets=2");
    ExpectAll(trainers_, "step");
  }
  // Kills the rank, and starts a process that takes its place at once.
  void Replace(std::size_t rank, const std::string& options = kHold) {
    trainers_[rank]->Kill();
    trainers_[rank] = std::make_unique<Trainer>(daemon_, static_cast<std::uint32_t>(rank), kRanks,
                                                "job", options);
    const Reply joined = trainers_[rank]->Join();
    ASSERT_TRUE(joined.ok()) << joined;
    EXPECT_EQ(joined.Field("replacement"), "yes");
    EXPECT_EQ(joined.Field("generation"), "1");
  }
  Reply Do(std::size_t rank, const std::string& command) { return trainers_[rank]->Do(command); }
  void Expect(std::size_t rank, const std::string& command) {
    const Reply reply = Do(rank, command);
    EXPECT_TRUE(reply.ok()) << "rank " << rank << ", " << command << ": " << reply;
  }
  // The other ranks end the step and wait for it.
  void OthersWait(std::uint64_t step) {
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (rank == kVictim) continue;
      Expect(rank, absl::StrCat("mark ", step, " 0"));
      Expect(rank, absl::StrCat("mark ", step, " 1"));
      Expect(rank, absl::StrCat("end ", step));
      trainers_[rank]->Begin(absl::StrCat("wait ", step));
    }
  }
  // The step is complete for them, with every rank's gradients.
  void ExpectOthersDone(const std::string& live_ranks = "3") {
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (rank == kVictim) continue;
      const Reply done = trainers_[rank]->Result();
      EXPECT_TRUE(done.ok()) << "rank " << rank << ": " << done;
      EXPECT_EQ(done.Field("live_ranks"), live_ranks);
    }
  }

  TestDaemon daemon_;
  Trainers trainers_;
};

// How far the victim is in step 2 when it dies.
struct Progress {
  const char* name;
  std::vector<std::string> commands;
  const char* next_step;  // of the replacement
};

class KilledRankTest : public HoldTest, public testing::WithParamInterface<Progress> {};

TEST_P(KilledRankTest, IsReplacedAndTheOthersSeeNothing) {
  Begin();
  for (const std::string& command : GetParam().commands) Expect(kVictim, command);
  // The answer of the daemon comes after it has read all that.
  EXPECT_EQ(Do(kVictim, "wait 2 timeout_ms=1").reason, "WAIT_TIMEOUT");
  OthersWait(2);
  Replace(kVictim);
  Expect(kVictim, "register buckets=2");
  const Reply next = Do(kVictim, "next");
  EXPECT_EQ(next.Field("step"), GetParam().next_step);
  if (next.Field("step") == "2") Expect(kVictim, "step");
  ExpectOthersDone();
  ExpectAll(trainers_, "step times=3");
  ExpectAll(trainers_, "barrier");
  ExpectAll(trainers_, "allreduce 100");
  ExpectAll(trainers_, "leave");
}

INSTANTIATE_TEST_SUITE_P(
    Moments, KilledRankTest,
    testing::Values(Progress{"BeforeItsFirstMark", {}, "2"},
                    Progress{"WithOneBucketMarked", {"mark 2 0"}, "2"},
                    Progress{"WithEveryBucketMarked", {"mark 2 1", "mark 2 0"}, "2"},
                    Progress{"AfterEndStep", {"mark 2 0", "mark 2 1", "end 2"}, "3"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(HoldTest, TheReplacementIsKilledToo) {
  Begin();
  OthersWait(2);
  for (int death = 0; death < 3; ++death) {
    Replace(kVictim);
    if (death == 0) continue;
    Expect(kVictim, "register buckets=2");
    if (death == 2) Expect(kVictim, "mark 2 1");
  }
  Replace(kVictim);
  Expect(kVictim, "register buckets=2");
  Expect(kVictim, "step");
  ExpectOthersDone();
  ExpectAll(trainers_, "step");
}

TEST_F(HoldTest, TwoRanksAreKilledAtOnce) {
  Begin();
  Expect(0, "mark 2 0");
  trainers_[2]->Kill();
  Replace(kVictim);
  Replace(2);
  for (const std::size_t rank : {kVictim, std::size_t{2}}) Expect(rank, "register buckets=2");
  Expect(0, "mark 2 1");
  Expect(0, "end 2");
  for (const std::size_t rank : {kVictim, std::size_t{2}}) trainers_[rank]->Begin("step");
  Expect(0, "wait 2");
  for (const std::size_t rank : {kVictim, std::size_t{2}}) {
    const Reply done = trainers_[rank]->Result();
    EXPECT_TRUE(done.ok()) << done;
  }
  ExpectAll(trainers_, "step");
}

TEST_F(HoldTest, ReplacementTakesPartInOperationsAfterItsFirstStep) {
  Begin();
  ExpectAll(trainers_, "barrier");
  OthersWait(2);
  Replace(kVictim);
  const Reply early = Do(kVictim, "barrier");
  EXPECT_EQ(early.reason, "PROTOCOL_VIOLATION") << early;
  EXPECT_NE(early.message.find("before the EndStep of its first complete step"), std::string::npos)
      << early;
  Expect(kVictim, "register buckets=2");
  Expect(kVictim, "step");
  ExpectOthersDone();
  ExpectAll(trainers_, "broadcast 100000 0");
}

// Also while the barrier of the others is open: each of them waits for the replacement's.
TEST_F(HoldTest, EveryRankCallsABarrierBetweenEndStepAndWaitStep) {
  Begin();
  const auto end_and_call = [&](std::size_t rank, std::uint64_t step) {
    for (const int bucket : {0, 1}) Expect(rank, absl::StrCat("mark ", step, " ", bucket));
    Expect(rank, absl::StrCat("end ", step));
    trainers_[rank]->Begin("barrier");
  };
  end_and_call(0, 2);
  Replace(kVictim);
  Expect(kVictim, "register buckets=2");
  end_and_call(kVictim, 2);
  end_and_call(2, 2);
  for (const std::uint64_t step : {2, 3}) {
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (step > 2) end_and_call(rank, step);
    }
    for (const auto& trainer : trainers_) {
      const Reply called = trainer->Result();
      EXPECT_TRUE(called.ok()) << called;
    }
    ExpectAll(trainers_, absl::StrCat("wait ", step));
  }
  // The ranks count alike.
  ExpectAll(trainers_, "allreduce 100");
}

TEST_F(HoldTest, OthersCallABarrierWithoutTheLostRank) {
  Begin();
  trainers_[kVictim]->Kill();
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    trainers_[rank]->Begin("barrier");
  }
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    const Reply reply = trainers_[rank]->Result();
    EXPECT_TRUE(reply.ok()) << reply;
  }
  Replace(kVictim);
  Expect(kVictim, "register buckets=2");
  ExpectAll(trainers_, "step");
  ExpectAll(trainers_, "barrier");
}

TEST_F(HoldTest, SecondProcessForALiveRankIsRefused) {
  Begin();
  Trainer second(daemon_, kVictim, kRanks, "job", absl::StrCat(kHold, " connect_timeout_ms=300"));
  const Reply refused = second.Join();
  EXPECT_EQ(refused.code, "ALREADY_EXISTS") << refused;
  EXPECT_EQ(refused.reason, "RANK_OCCUPIED") << refused;
  ExpectAll(trainers_, "step");
}

TEST_F(HoldTest, OnlyTheReplacementWithAnotherModelIsRefused) {
  Begin();
  OthersWait(2);
  Replace(kVictim);
  const Reply refused = Do(kVictim, "register buckets=3");
  EXPECT_EQ(refused.reason, "LAYOUT_MISMATCH") << refused;
  Expect(kVictim, "register buckets=2");
  Expect(kVictim, "step");
  ExpectOthersDone();
}

TEST_F(HoldTest, ReplacementWithOtherOptionsIsRefused) {
  Begin();
  OthersWait(2);
  trainers_[kVictim]->Kill();
  Trainer wrong(daemon_, kVictim, kRanks, "job", absl::StrCat(kHold, " divisor=world"));
  const Reply refused = wrong.Join();
  EXPECT_EQ(refused.reason, "JOB_MISMATCH") << refused;
  Replace(kVictim);
  Expect(kVictim, "register buckets=2");
  Expect(kVictim, "step");
  ExpectOthersDone();
}

TEST_F(HoldTest, LeaveWaitsForTheRankThatIsLostBeforeIt) {
  Begin();
  trainers_[0]->Begin("leave");
  trainers_[2]->Begin("finish");
  EXPECT_TRUE(daemon_.AwaitStatus([](const auto& status) {
    std::vector<std::string> states;
    for (const auto& session : status.jobs(0).sessions()) states.push_back(session.state());
    return states == std::vector<std::string>{"left", "live", "finished"};
  }));
  Replace(kVictim);
  Expect(kVictim, "leave");
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    const Reply left = trainers_[rank]->Result();
    EXPECT_TRUE(left.ok()) << left;
  }
}

TEST_F(HoldTest, JobEndsWhenNobodyReplacesTheRankInTime) {
  Begin(absl::StrCat(kHold, " hold_timeout_ms=500"));
  OthersWait(2);
  trainers_[kVictim]->Kill();
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    const Reply lost = trainers_[rank]->Result();
    EXPECT_EQ(lost.reason, "RANK_LOST") << lost;
    EXPECT_EQ(lost.Field("rank"), "1") << lost;
    EXPECT_NE(lost.message.find("did not come back within hold_timeout, 500ms"), std::string::npos)
        << lost;
  }
}

class ShortLeaseTest : public HoldTest {
 protected:
  ShortLeaseTest() : HoldTest({"--lease=3s"}) {}
};

TEST_F(ShortLeaseTest, StoppedProcessIsKilledAndReplaced) {
  Begin();
  OthersWait(2);
  const std::unique_ptr<Trainer> stopped = std::move(trainers_[kVictim]);
  stopped->Signal(SIGSTOP);
  // Join tries again until the rank is free.
  trainers_[kVictim] =
      std::make_unique<Trainer>(daemon_, static_cast<std::uint32_t>(kVictim), kRanks, "job", kHold);
  const Reply joined = trainers_[kVictim]->Join();
  ASSERT_TRUE(joined.ok()) << joined;
  EXPECT_EQ(joined.Field("replacement"), "yes");
  Expect(kVictim, "register buckets=2");
  Expect(kVictim, "step");
  ExpectOthersDone();
}

TEST_F(HoldTest, LossBeforeTheFirstCompleteStepEndsTheJob) {
  trainers_ = JoinedTrainers(daemon_, kRanks, "job", kHold);
  ExpectAll(trainers_, "register buckets=2");
  OthersWait(1);
  trainers_[kVictim]->Kill();
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    const Reply lost = trainers_[rank]->Result();
    EXPECT_EQ(lost.reason, "RANK_LOST") << lost;
    EXPECT_NE(lost.message.find("It could not be held, because layout 'default' had no complete"),
              std::string::npos)
        << lost;
  }
}

TEST_F(HoldTest, DaemonThatDrainsEndsAHeldStepAtOnce) {
  Begin();
  OthersWait(2);
  trainers_[kVictim]->Kill();
  EXPECT_EQ(daemon_.Stop(), 0);
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    const Reply ended = trainers_[rank]->Result();
    EXPECT_EQ(ended.code, "UNAVAILABLE") << ended;
  }
}

}  // namespace
}  // namespace gradsync::fault
