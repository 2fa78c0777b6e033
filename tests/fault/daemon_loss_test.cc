// The daemon is killed: every trainer learns of it within 100 ms, survives, and joins the next
// daemon.

#include <csignal>
#include <cstdio>
#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

void ExpectLost(const Reply& reply, std::uint64_t cause_ns, const std::string& reason) {
  EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
  EXPECT_EQ(reply.reason, reason) << reply;
  EXPECT_NE(reply.message.find("join again"), std::string::npos) << reply;
  ASSERT_GE(reply.end_ns, cause_ns) << reply;
  std::printf("daemon kill -> %s: %.1f ms\n", reason.c_str(),
              static_cast<double>(reply.end_ns - cause_ns) / 1e6);
  EXPECT_LE(reply.end_ns - cause_ns, FairBoundNs(kLossBoundNs, cause_ns)) << reply;
}

// Every call of a session fails once its daemon is lost.
void ExpectFutureCallsFail(Trainer* trainer, const std::string& reason) {
  for (const char* call : {"mark 1 0", "end 1", "wait 1", "wait_bucket 1 0", "barrier",
                           "broadcast 10 0", "allreduce 10", "register layout=late"}) {
    const Reply reply = trainer->Do(call);
    EXPECT_EQ(reply.code, "UNAVAILABLE") << call << ": " << reply;
    EXPECT_TRUE(reply.reason == reason || reply.reason == "DAEMON_LOST") << call << ": " << reply;
    EXPECT_LE(reply.end_ns - reply.start_ns, FairBoundNs(kLossBoundNs, reply.start_ns))
        << call << ": " << reply;
  }
}

TEST(KilledDaemon, EndsWaitsInTimeAndTrainersSurvive) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "mark 1 0");
  // Rank 0 has ended its step. The others have not.
  ASSERT_TRUE(trainers[0]->Do("mark 1 1").ok());
  ASSERT_TRUE(trainers[0]->Do("end 1").ok());
  ASSERT_EQ(trainers[0]->Do("wait 1 timeout_ms=1").reason, "WAIT_TIMEOUT");
  trainers[0]->Begin("wait 1");
  trainers[1]->Begin("wait_bucket 1 1");
  trainers[2]->Begin("barrier");
  const std::uint64_t cause_ns = daemon.Kill();
  ExpectLost(trainers[0]->Result(), cause_ns, "STEP_IN_DOUBT");
  ExpectLost(trainers[1]->Result(), cause_ns, "DAEMON_LOST");
  ExpectLost(trainers[2]->Result(), cause_ns, "DAEMON_LOST");
  ExpectFutureCallsFail(trainers[0].get(), "STEP_IN_DOUBT");
  ExpectFutureCallsFail(trainers[1].get(), "DAEMON_LOST");
  ExpectFutureCallsFail(trainers[2].get(), "DAEMON_LOST");

  daemon.Start();
  JoinAll(trainers);
  ExpectAll(trainers, "register");
  for (const Reply& reply : DoAll(trainers, "step times=3")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("step"), "3") << reply;
  }
  ExpectAll(trainers, "leave");
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Quit(), 0);
}

TEST(KilledDaemon, FailsARegistration) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  trainers[0]->Begin("register");
  ASSERT_EQ(daemon.Status().jobs_size(), 1);
  const std::uint64_t cause_ns = daemon.Kill();
  ExpectLost(trainers[0]->Result(), cause_ns, "DAEMON_LOST");
}

TEST(KilledDaemon, FailsABroadcastAndLeaveAndStay) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  trainers[0]->Begin("broadcast 1000000 0");
  trainers[1]->Begin("leave_stay");
  ASSERT_EQ(daemon.Status().jobs_size(), 1);
  const std::uint64_t cause_ns = daemon.Kill();
  ExpectLost(trainers[0]->Result(), cause_ns, "DAEMON_LOST");
  ExpectLost(trainers[1]->Result(), cause_ns, "DAEMON_LOST");
}

TEST(KilledDaemon, LeavesCommittedStepsReadable) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=2");
  daemon.Kill();
  for (const auto& trainer : trainers) {
    EXPECT_EQ(trainer->Do("barrier").reason, "DAEMON_LOST");
    // The verdict arrived before the kill, and the arena still holds the averages.
    const Reply reply = trainer->Do("wait 2");
    EXPECT_TRUE(reply.ok()) << reply;
  }
}

TEST(StoppedDaemon, IsReportedByWaitsThatSucceedAfterItContinues) {
  // When the daemon continues, every trainer must answer in time, on a busy machine, too.
  TestDaemon daemon({"--lease=3s"});
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "mark 1 0");
  ASSERT_TRUE(trainers[0]->Do("mark 1 1").ok());
  ASSERT_TRUE(trainers[0]->Do("end 1").ok());
  trainers[0]->Begin("wait 1");
  trainers[1]->Begin("wait_bucket 1 1");
  trainers[2]->Begin("barrier");
  daemon.process().Signal(SIGSTOP);
  const std::uint64_t cause_ns = NowNs();
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Result();
    EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
    EXPECT_EQ(reply.reason, "DAEMON_SILENT") << reply;
    EXPECT_NE(reply.message.find("its lease is 3s"), std::string::npos) << reply;
    std::printf("daemon stop -> error: %.0f ms\n",
                static_cast<double>(reply.end_ns - cause_ns) / 1e6);
    EXPECT_LE(reply.end_ns - cause_ns, FairBoundNs(8'000'000'000ull * kScale, cause_ns)) << reply;
  }
  // The daemon may or may not have counted this rank's barrier.
  EXPECT_EQ(trainers[2]->Do("barrier").reason, "DAEMON_SILENT");

  trainers[0]->Begin("wait 1");
  daemon.process().Signal(SIGCONT);
  for (const int rank : {1, 2}) {
    EXPECT_TRUE(trainers[rank]->Do("mark 1 1").ok());
    EXPECT_TRUE(trainers[rank]->Do("end 1").ok());
  }
  const Reply reply = trainers[0]->Result();
  EXPECT_TRUE(reply.ok()) << reply;
  for (const int rank : {1, 2}) {
    const Reply other = trainers[rank]->Do("wait 1");
    EXPECT_TRUE(other.ok()) << other;
  }
  for (const Reply& next : DoAll(trainers, "step")) EXPECT_TRUE(next.ok()) << next;
}

TEST(AbsentDaemon, IsUnavailableAfterTheConnectTimeout) {
  TemporaryDirectory directory;
  Trainer trainer(directory.File("gradsyncd.sock"), 0, 1, "job", "connect_timeout_ms=50");
  const Reply reply = trainer.Join();
  EXPECT_EQ(reply.code, "UNAVAILABLE") << reply;
  EXPECT_EQ(reply.reason, "DAEMON_LOST") << reply;
  EXPECT_NE(reply.message.find("no daemon at"), std::string::npos) << reply;
}

TEST(LateDaemon, IsWaitedFor) {
  TestDaemon daemon;
  daemon.Kill();
  Trainer trainer(daemon, 0, 1);
  trainer.Send(trainer.join());
  daemon.Start();
  const Reply reply = trainer.Receive();
  EXPECT_TRUE(reply.ok()) << reply;
}

}  // namespace
}  // namespace gradsync::fault
