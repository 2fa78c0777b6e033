// A rank is killed, stops or abandons a step: every other rank learns within 100 ms which rank it
// is, in which step and bucket, and how the loss was detected.

#include <signal.h>

#include <cinttypes>
#include <cstdio>
#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

// `cause_ns`: the time just before the kill.
void ExpectWithinBound(const Reply& reply, std::uint64_t cause_ns, const char* what) {
  ASSERT_GE(reply.end_ns, cause_ns) << reply;
  const std::uint64_t elapsed_ns = reply.end_ns - cause_ns;
  std::printf("%s: %.1f ms\n", what, static_cast<double>(elapsed_ns) / 1e6);
  EXPECT_LE(elapsed_ns, FairBoundNs(kLossBoundNs, cause_ns)) << what << ": " << reply;
}

void ExpectNamesRank1(const Reply& reply) {
  EXPECT_EQ(reply.code, "ABORTED") << reply;
  EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
  EXPECT_EQ(reply.Field("rank"), "1") << reply;
  EXPECT_NE(reply.message.find("rank 1 of job 'job' was lost"), std::string::npos) << reply;
  EXPECT_NE(reply.message.find("known because its "), std::string::npos) << reply;
}

// Later calls of a survivor fail at once, with the message of its first error.
void ExpectFail(Trainer* survivor, const std::vector<std::string>& calls, const Reply& first) {
  for (const std::string& call : calls) {
    const Reply reply = survivor->Do(call);
    ExpectNamesRank1(reply);
    EXPECT_EQ(reply.message, first.message);
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(kLossBoundNs, reply.start_ns)) << reply;
  }
}

void ExpectFutureCallsFail(Trainer* survivor, const Reply& first) {
  ExpectFail(survivor, {"barrier", "register layout=late"}, first);
}

void ExpectFutureStepCallsFail(Trainer* survivor, const Reply& first) {
  ExpectFail(survivor, {"mark 1 0", "end 1", "wait 1", "wait_bucket 1 0", "abandon 1 x"}, first);
}

// Returns when the daemon has handled every message of the rank so far. The step continues.
void Settle(Trainer* trainer, const std::string& step) {
  const Reply reply = trainer->Do("wait " + step + " timeout_ms=1");
  ASSERT_EQ(reply.reason, "WAIT_TIMEOUT") << reply;
}

// Ranks 0 and 2 wait for step 1. Rank 1 has marked bucket 0 only.
void BeginStep(const Trainers& trainers) {
  ExpectAll(trainers, "register buckets=2");
  ExpectAll(trainers, "mark 1 0");
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(trainers[rank]->Do("mark 1 1").ok());
    ASSERT_TRUE(trainers[rank]->Do("end 1").ok());
  }
  for (const auto& trainer : trainers) Settle(trainer.get(), "1");
  for (const int rank : {0, 2}) trainers[rank]->Begin("wait 1");
}

void ExpectStepLost(const Trainers& trainers, std::uint64_t cause_ns, const char* what) {
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, what);
    ExpectNamesRank1(reply);
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_EQ(reply.Field("bucket"), "1") << reply;
    EXPECT_NE(reply.message.find("in step 1 of layout 'default', bucket 1 not ready"),
              std::string::npos)
        << reply;
    ExpectFutureStepCallsFail(trainers[rank].get(), reply);
    ExpectFutureCallsFail(trainers[rank].get(), reply);
  }
}

TEST(KilledTrainer, LossBeforeRegisterFailsTheRegistrationOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  for (const int rank : {0, 2}) trainers[rank]->Begin("register");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, "kill before register -> error");
    ExpectNamesRank1(reply);
    ExpectFutureCallsFail(trainers[rank].get(), reply);
  }
}

TEST(KilledTrainer, LossBeforeMappingFailsTheRegistrationOfTheOthersAndFreesItsArena) {
  TestDaemon daemon;
  Trainers trainers;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(daemon, rank, 3));
    const Reply joined = rank == 1
                             ? trainers[1]->Do("raw_open rank=1 world=3 socket=" + daemon.socket())
                             : trainers[rank]->Join();
    ASSERT_TRUE(joined.ok()) << joined;
  }
  ASSERT_TRUE(trainers[1]->Do("raw_register").ok());
  for (const int rank : {0, 2}) trainers[rank]->Begin("register");
  EXPECT_GT(daemon.CountDescriptors("memfd:gradsync"), 0);
  const std::uint64_t cause_ns = trainers[1]->Kill();
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, "kill before mapping -> error");
    ExpectNamesRank1(reply);
    EXPECT_NE(reply.message.find("while layout 'default' was being agreed"), std::string::npos)
        << reply;
    ExpectFutureCallsFail(trainers[rank].get(), reply);
    EXPECT_TRUE(trainers[rank]->Do("drop").ok());
  }
  EXPECT_TRUE(daemon.AwaitStatus([](const auto& status) { return status.arena_bytes() == 0; }));
  EXPECT_EQ(daemon.CountDescriptors("memfd:gradsync"), 0);
}

TEST(KilledTrainer, LossInAStepFailsTheStepOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  BeginStep(trainers);
  ExpectStepLost(trainers, trainers[1]->Kill(), "kill in a step -> error");
}

TEST(KilledTrainer, LossInAStepFailsTheBucketWaitsOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  Settle(trainers[0].get(), "1");
  trainers[0]->Begin("wait_bucket 1 0");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, cause_ns, "kill -> error of a bucket's wait");
  ExpectNamesRank1(reply);
  EXPECT_EQ(reply.Field("bucket"), "0") << reply;
}

TEST(KilledTrainer, LossAfterEndStepFailsTheStepOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register buckets=2");
  for (const int rank : {0, 1}) {
    for (const char* call : {"mark 1 0", "mark 1 1", "end 1"}) {
      ASSERT_TRUE(trainers[rank]->Do(call).ok());
    }
    Settle(trainers[rank].get(), "1");
  }
  trainers[0]->Begin("wait 1");
  trainers[2]->Begin("barrier");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, "kill after EndStep -> error");
    ExpectNamesRank1(reply);
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_NE(reply.message.find("in step 1 of layout 'default', every bucket ready"),
              std::string::npos)
        << reply;
    ExpectFutureStepCallsFail(trainers[rank].get(), reply);
  }
}

TEST(KilledTrainer, LossBetweenStepsFailsTheNextStepOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ExpectAll(trainers, "step times=3");
  ASSERT_TRUE(trainers[0]->Do("mark 4 0").ok());
  Settle(trainers[0].get(), "4");
  trainers[0]->Begin("wait 4");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, cause_ns, "kill between steps -> error");
  ExpectNamesRank1(reply);
  EXPECT_EQ(reply.Field("step"), "4") << reply;
  EXPECT_EQ(reply.Field("bucket"), "0") << reply;
}

TEST(KilledTrainer, LossInABarrierFailsTheBarrierOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  trainers[0]->Begin("barrier");
  trainers[1]->Begin("barrier");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, cause_ns, "kill in a barrier -> error");
  ExpectNamesRank1(reply);
  for (const int rank : {0, 2}) ExpectFutureCallsFail(trainers[rank].get(), reply);
}

TEST(KilledTrainer, LossInABroadcastFailsTheBroadcastOfTheOthers) {
  TestDaemon daemon({"--staging_bytes=1MiB"});
  const auto trainers = JoinedTrainers(daemon, 3);
  // Rank 1 takes part, but never reads a chunk.
  trainers[1]->Begin("broadcast 8000000 0");
  ASSERT_TRUE(trainers[1]->Do("jobs socket=" + daemon.socket()).ok());
  trainers[1]->Signal(SIGSTOP);
  for (const int rank : {0, 2}) trainers[rank]->Begin("broadcast 8000000 0");
  ASSERT_EQ(daemon.Status().jobs_size(), 1);
  const std::uint64_t cause_ns = trainers[1]->Kill();
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, "kill in a broadcast -> error");
    ExpectNamesRank1(reply);
    ExpectFutureCallsFail(trainers[rank].get(), reply);
  }
}

TEST(KilledTrainer, LossDuringAReplacementFailsItForTheOthersAndFreesItsArena) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register buckets=2");
  ExpectAll(trainers, "step times=2");
  for (const int rank : {0, 2}) trainers[rank]->Begin("replace buckets=3");
  ASSERT_TRUE(
      daemon.AwaitStatus([](const auto& status) { return status.jobs(0).layouts_size() == 2; }));
  const std::uint64_t cause_ns = trainers[1]->Kill();
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, cause_ns, "kill during a replacement -> error");
    ExpectNamesRank1(reply);
    EXPECT_NE(reply.message.find("while layout 'default' was being replaced"), std::string::npos)
        << reply;
    ExpectFutureStepCallsFail(trainers[rank].get(), reply);
    ExpectFutureCallsFail(trainers[rank].get(), reply);
    // The last verdict and its averages stay readable.
    EXPECT_TRUE(trainers[rank]->Do("wait 2").ok());
    EXPECT_TRUE(trainers[rank]->Do("drop").ok());
  }
  EXPECT_TRUE(daemon.AwaitStatus([](const auto& status) { return status.arena_bytes() == 0; }));
  EXPECT_EQ(daemon.CountDescriptors("memfd:gradsync"), 0);
}

bool OneIsAway(const v1::GetStatusResponse& status) {
  int away = 0;
  for (const auto& session : status.jobs(0).sessions()) away += session.state() == "left" ? 1 : 0;
  return away == 1;
}

TEST(KilledTrainer, FailsLeaveAndStayOfTheOthers) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  trainers[0]->Begin("leave_stay");
  ASSERT_TRUE(daemon.AwaitStatus(OneIsAway));
  ASSERT_TRUE(trainers[1]->Do("step ranks=1").ok());
  const std::uint64_t cause_ns = trainers[1]->Kill();
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, cause_ns, "kill -> error of LeaveAndStay");
  ExpectNamesRank1(reply);
  ExpectFutureStepCallsFail(trainers[0].get(), reply);
}

TEST(KilledTrainer, LossAfterLeaveAndStayFailsTheStepOfTheOther) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  trainers[1]->Begin("leave_stay");
  ASSERT_TRUE(daemon.AwaitStatus(OneIsAway));
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  trainers[0]->Begin("wait 1");
  const std::uint64_t cause_ns = trainers[1]->Kill();
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, cause_ns, "kill of a rank that is away -> error");
  ExpectNamesRank1(reply);
  EXPECT_NE(reply.message.find("after it had left"), std::string::npos) << reply;
}

TEST(KilledTrainer, IsReportedAtOnceDespiteForkedChildren) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ASSERT_TRUE(trainers[1]->Do("fork").ok());
  ASSERT_TRUE(trainers[1]->Do("fork").ok());
  BeginStep(trainers);
  ExpectStepLost(trainers, trainers[1]->Kill(), "kill, forked children live -> error");
}

TEST(KilledTrainer, IsReportedAtOnceDespiteChildrenWithItsSocket) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ASSERT_TRUE(trainers[1]->Do("raw_fork").ok());
  BeginStep(trainers);
  ExpectStepLost(trainers, trainers[1]->Kill(), "kill, socket held by a child -> error");
}

TEST(KilledTrainer, LetsTheJobStartAgainAtStep1) {
  TestDaemon daemon;
  auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=2");
  trainers[1]->Kill();
  trainers[1] = std::make_unique<Trainer>(daemon, 1, 2);
  for (const auto& trainer : trainers) trainer->Send(trainer->join());
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("generation"), "2") << reply;
  }
  ExpectAll(trainers, "register");
  for (const Reply& reply : DoAll(trainers, "step")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("step"), "1") << reply;
  }
  ExpectAll(trainers, "leave");
}

TEST(AbandonedStep, IsReportedAtOnceAndTheNextStepIsRight) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  BeginStep(trainers);
  const Reply abandoned = trainers[1]->Do("abandon 1 an exception in backward");
  ASSERT_TRUE(abandoned.ok()) << abandoned;
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectWithinBound(reply, abandoned.start_ns, "abandon -> error");
    EXPECT_EQ(reply.code, "ABORTED") << reply;
    EXPECT_EQ(reply.reason, "STEP_ABANDONED") << reply;
    EXPECT_EQ(reply.Field("rank"), "1") << reply;
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_NE(reply.message.find("rank 1"), std::string::npos) << reply;
    EXPECT_NE(reply.message.find("an exception in backward"), std::string::npos) << reply;
  }
  const Reply own = trainers[1]->Do("wait 1");
  EXPECT_EQ(own.reason, "STEP_ABANDONED") << own;
  EXPECT_EQ(own.message, trainers[0]->Do("wait 1").message);
  for (const Reply& reply : DoAll(trainers, "step")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("step"), "2") << reply;
  }
  ExpectAll(trainers, "leave");
}

TEST(AbandonedStep, EndsABucketWait) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  trainers[0]->Begin("wait_bucket 1 0");
  const Reply abandoned = trainers[1]->Do("abandon 1 out of memory");
  const Reply reply = trainers[0]->Result();
  ExpectWithinBound(reply, abandoned.start_ns, "abandon -> error of a bucket's wait");
  EXPECT_EQ(reply.reason, "STEP_ABANDONED") << reply;
  EXPECT_NE(reply.message.find("out of memory"), std::string::npos) << reply;
}

TEST(StoppedTrainer, IsLostAfterItsLeaseAndLearnsSoWhenItContinues) {
  // The others must answer in time on a busy machine, too.
  constexpr std::uint64_t kLeaseNs = 3'000'000'000;
  TestDaemon daemon({"--lease=3s"});
  const auto trainers = JoinedTrainers(daemon, 3);
  BeginStep(trainers);
  const std::uint64_t cause_ns = NowNs();
  trainers[1]->Signal(SIGSTOP);
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    ExpectNamesRank1(reply);
    EXPECT_NE(reply.message.find("lease"), std::string::npos) << reply;
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_EQ(reply.Field("bucket"), "1") << reply;
    EXPECT_GE(reply.end_ns - cause_ns, kLeaseNs / 4) << "its lease was renewed before it stopped";
    std::printf("stop -> error: %.0f ms\n", static_cast<double>(reply.end_ns - cause_ns) / 1e6);
    EXPECT_LE(reply.end_ns - cause_ns, kLeaseNs + FairBoundNs(kLossBoundNs, cause_ns)) << reply;
  }
  trainers[1]->Signal(SIGCONT);
  const Reply own = trainers[1]->Do("wait 1");
  EXPECT_EQ(own.code, "ABORTED") << own;
  EXPECT_EQ(own.reason, "LEASE_EXPIRED") << own;
  EXPECT_NE(own.message.find("lease"), std::string::npos) << own;
}

TEST(StoppedTrainer, ContinuesWithinItsLease) {
  TestDaemon daemon({"--lease=1h"});
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  trainers[1]->Signal(SIGSTOP);
  trainers[0]->Begin("step");
  ASSERT_EQ(daemon.Status().jobs_size(), 1);
  trainers[1]->Signal(SIGCONT);
  EXPECT_TRUE(trainers[1]->Do("step").ok());
  EXPECT_TRUE(trainers[0]->Result().ok());
}

}  // namespace
}  // namespace gradsync::fault
