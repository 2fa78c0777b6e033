// Jobs that share a daemon do not affect each other.

#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

TEST(EightJobs, RunAtOnceAndSurviveTheLossOfOne) {
  TestDaemon daemon({"--reduce_threads=2"});
  constexpr int kJobs = 8;
  std::vector<Trainers> jobs;
  for (int job = 0; job < kJobs; ++job) {
    jobs.push_back(JoinedTrainers(daemon, 2, "job" + std::to_string(job)));
  }
  // Every job has different sizes, so that a mix-up is visible.
  const auto on_all = [&jobs](const std::string& command) {
    for (std::size_t job = 0; job < jobs.size(); ++job) {
      for (const auto& trainer : jobs[job]) {
        trainer->Send(command == "register"
                          ? "register buckets=3 count=" + std::to_string(20'000 + 1'000 * job)
                          : command);
      }
    }
  };
  on_all("register");
  for (const auto& job : jobs) {
    for (const auto& trainer : job) EXPECT_TRUE(trainer->Receive().ok());
  }
  EXPECT_EQ(daemon.Status().jobs_size(), kJobs);
  on_all("step times=20");
  // While they run, a rank of job 3 is killed.
  jobs[3][1]->Kill();
  for (int job = 0; job < kJobs; ++job) {
    for (const int rank : {0, 1}) {
      if (job == 3 && rank == 1) continue;
      const Reply reply = jobs[job][rank]->Receive();
      if (job != 3) {
        EXPECT_TRUE(reply.ok()) << "job " << job << ": " << reply;
        EXPECT_EQ(reply.Field("step"), "20") << "job " << job << ": " << reply;
      } else if (!reply.ok()) {  // the command may have ended before the kill
        EXPECT_EQ(reply.reason, "RANK_LOST") << reply;
        EXPECT_NE(reply.message.find("of job 'job3'"), std::string::npos) << reply;
      }
    }
  }
  EXPECT_EQ(jobs[3][0]->Do("step").reason, "RANK_LOST");
  jobs.erase(jobs.begin() + 3);
  on_all("step times=2");
  for (const auto& job : jobs) {
    for (const auto& trainer : job) EXPECT_TRUE(trainer->Receive().ok());
    ExpectAll(job, "leave");
  }
  const auto stats = daemon.Stats();
  EXPECT_EQ(stats.sessions_opened(), 2u * kJobs);
  EXPECT_EQ(stats.sessions_lost(), 1u);
}

TEST(TwoLayouts, CountStepsSeparatelyInOneSession) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  // Like a GAN: two modules, trained by turns of different lengths.
  ExpectAll(trainers, "register layout=generator buckets=2 count=3000");
  ExpectAll(trainers, "register layout=critic parameters=w:30x40,b:40 dtype=float64 op=sum");
  for (int i = 0; i < 3; ++i) {
    ExpectAll(trainers, "step layout=critic times=4");
    ExpectAll(trainers, "step layout=generator");
  }
  EXPECT_EQ(trainers[0]->Do("next layout=critic").Field("step"), "13");
  EXPECT_EQ(trainers[0]->Do("next layout=generator").Field("step"), "4");
  // Both layouts have a running step, and one is abandoned.
  for (const auto& trainer : trainers) ASSERT_TRUE(trainer->Do("mark 4 0 layout=generator").ok());
  ASSERT_TRUE(trainers[1]->Do("abandon 13 layout=critic").ok());
  for (const auto& trainer : trainers) {
    EXPECT_EQ(trainer->Do("wait 13 layout=critic").reason, "STEP_ABANDONED");
  }
  ExpectAll(trainers, "mark 4 1 layout=generator");
  ExpectAll(trainers, "end 4 layout=generator");
  ExpectAll(trainers, "wait 4 layout=generator");
  ExpectAll(trainers, "step layout=critic");
  // A layout can be registered late.
  ExpectAll(trainers, "register layout=late");
  ExpectAll(trainers, "step layout=late");
  ExpectAll(trainers, "leave");
}

TEST(ForkedChild, IsRefusedEveryCallAndDoesNotDisturbItsParent) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step");
  ASSERT_TRUE(trainers[0]->Do("mark 2 0").ok());
  const Reply reply = trainers[0]->Do("fork_calls");
  ASSERT_TRUE(reply.ok()) << reply;
  EXPECT_EQ(reply.Field("exit"), "0") << "destructors in the child do nothing";
  std::string expected;
  for (int i = 0; i < 12; ++i)
    expected += std::string(i > 0 ? " " : "") + "FAILED_PRECONDITION/FORKED";
  EXPECT_EQ(reply.Field("calls"), expected);
  // The parent's step continues.
  ASSERT_TRUE(trainers[0]->Do("mark 2 1").ok());
  ASSERT_TRUE(trainers[0]->Do("end 2").ok());
  EXPECT_TRUE(trainers[1]->Do("step").ok());
  EXPECT_TRUE(trainers[0]->Do("wait 2").ok());
  ExpectAll(trainers, "step times=3");
  ExpectAll(trainers, "leave");
}

#ifdef __SANITIZE_ADDRESS__
// The sanitizer's check of an object's type opens a pipe, and ends a process that cannot.
constexpr int kFewestDescriptors = 9;
#else
// Six are open at a trainer's start: three standard ones, two of the library loader, one of the
// test.
constexpr int kFewestDescriptors = 6;
#endif

// gRPC aborts a process in which it cannot open its descriptors.
TEST(TrainerWithFewDescriptors, JoinsOrErrorNamesTheRemedy) {
  const TestDaemon daemon;
  int joined = 0, refused = 0;
  for (int limit = kFewestDescriptors; limit < 24; ++limit) {
    const std::string job = "limit" + std::to_string(limit);
    Trainer trainer(daemon.socket(), 0, 1, job, "",
                    {"/usr/bin/prlimit", "--nofile=" + std::to_string(limit)});
    const Reply reply = trainer.Join();
    ASSERT_TRUE(reply.ok() || reply.reason == "OPEN_FILES") << limit << ": " << reply;
    ++(reply.ok() ? joined : refused);
  }
  EXPECT_GT(joined, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace gradsync::fault
