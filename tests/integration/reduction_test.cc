// Compares the result of a step, element by element, with the reduction of what the ranks wrote.

#include <cstdio>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"
#include "tests/kit/wake_up_delay.h"

namespace gradsync::fault {
namespace {

class Reduction : public testing::TestWithParam<std::tuple<const char*, const char*, int>> {};

TEST_P(Reduction, IncludesEveryRank) {
  const auto [dtype, op, ranks] = GetParam();
  TestDaemon daemon({"--reduce_threads=2"});
  const auto trainers = JoinedTrainers(daemon, static_cast<std::uint32_t>(ranks));
  const std::string how = std::string(" dtype=") + dtype + " op=" + op;
  // Sizes: empty, one element, odd, and large enough to be sliced. Then buckets made by the rule
  // from parameters.
  for (const char* count : {"0", "1", "4097", "600001"}) {
    const std::string name = std::string(" layout=explicit") + count;
    std::string command = std::string("register buckets=2 count=") + count;
    command.append(name).append(how);
    ExpectAll(trainers, command);
    ExpectAll(trainers, "step times=2" + name);
  }
  ExpectAll(trainers, "register layout=rule parameters=w:300x1000,b:7,scale:1" + how);
  ExpectAll(trainers, "step layout=rule times=2");
  for (const char* count : {"0", "1", "1023", "70000"}) {
    ExpectAll(trainers, "allreduce " + std::string(count) + how);
  }
  ExpectAll(trainers, "leave");
}

INSTANTIATE_TEST_SUITE_P(Every, Reduction,
                         testing::Combine(testing::Values("float32", "float64", "float16",
                                                          "bfloat16"),
                                          testing::Values("average", "sum"), testing::Values(2, 4)),
                         [](const auto& one) {
                           return std::string(std::get<0>(one.param)) + std::get<1>(one.param) +
                                  std::to_string(std::get<2>(one.param));
                         });

TEST(LayoutOfManyParameters, IsRegisteredWithoutDelay) {
  // The message is many times larger than a socket's buffer.
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  std::string parameters = "first:1";
  for (int i = 0; i < 20'000; ++i) {
    parameters += ",a_module.with_a_rather_long_name.layer_" + std::to_string(i) + ".weight:2x3";
  }
  for (const Reply& reply : DoAll(trainers, "register parameters=" + parameters)) {
    EXPECT_TRUE(reply.ok()) << reply;
    std::printf("20 001 parameters: %.2f s\n",
                static_cast<double>(reply.end_ns - reply.start_ns) / 1e9);
    EXPECT_LT(reply.end_ns - reply.start_ns, FairBoundNs(5'000'000'000ull * kScale, reply.start_ns))
        << reply;
  }
  ExpectAll(trainers, "step times=2");
  ExpectAll(trainers, "leave");
}

TEST(SingleRank, GetsItsOwnGradientsBack) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 1);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=3");
  ExpectAll(trainers, "leave");
}

class LeaveMidRun : public testing::TestWithParam<const char*> {};

TEST_P(LeaveMidRun, OtherRanksContinue) {
  const bool by_world = std::string(GetParam()) == "divisor=world";
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3, "job", GetParam());
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step times=2");
  // The others are in step 3 when rank 1 runs out of data.
  trainers[0]->Begin("step ranks=0,2");
  ASSERT_TRUE(trainers[1]->Do("leave").ok());
  trainers[2]->Begin("step ranks=0,2");
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Result();
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("live_ranks"), "2") << reply;
    EXPECT_EQ(reply.Field("divisor"), by_world ? "3" : "2") << reply;
  }
  EXPECT_EQ(trainers[1]->Do("step").reason, "LEFT");
  ASSERT_TRUE(trainers[2]->Do("leave").ok());
  const Reply last = trainers[0]->Do("step ranks=0 times=2");
  EXPECT_TRUE(last.ok()) << last;
  EXPECT_EQ(last.Field("divisor"), by_world ? "3" : "1") << last;
  EXPECT_TRUE(trainers[0]->Do("leave").ok());
}

INSTANTIATE_TEST_SUITE_P(Divide, LeaveMidRun, testing::Values("divisor=live", "divisor=world"),
                         [](const auto& one) {
                           return std::string(one.param) == "divisor=world" ? "ByWorld"
                                                                            : "ByLiveRanks";
                         });

TEST(Replacement, KeepsTheStepNumberAndTheDaemonSmall) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2 count=1000");
  for (int i = 1; i <= 20; ++i) {
    ExpectAll(trainers, "step");
    ExpectAll(trainers, "replace count=2000 buckets=" + std::to_string(1 + i % 3));
    EXPECT_EQ(trainers[0]->Do("next").Field("step"), std::to_string(i + 1));
  }
  // A session holds its staging memory and one arena.
  EXPECT_TRUE(daemon.AwaitStatus([](const auto& status) {
    return status.jobs(0).layouts_size() == 1 && status.jobs(0).layouts(0).step() == 21;
  }));
  EXPECT_TRUE(daemon.AwaitStatus(
      [](const auto& status) { return status.arena_bytes() < (2 * 33u << 20); }));
  // At most three per rank: staging memory, one arena, one page of semaphores. Replaced arenas keep
  // no descriptor, once the daemon's copier has come to them.
  EXPECT_TRUE(daemon.AwaitStatus([&](const auto&) {
    return daemon.CountDescriptors("memfd:gradsync") <= 6;
  })) << daemon.CountDescriptors("memfd:gradsync");
  ASSERT_EQ(daemon.Stats().jobs(0).layouts_size(), 1);
  EXPECT_EQ(daemon.Stats().jobs(0).layouts(0).steps_complete(), 20u);
  ExpectAll(trainers, "leave");
}

TEST(LeaveAndStay, WorksEveryEpochWithUnevenData) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register");
  for (int epoch = 0; epoch < 5; ++epoch) {
    ExpectAll(trainers, "step times=2");
    trainers[0]->Begin("leave_stay");
    for (const int rank : {1, 2}) trainers[rank]->Begin("step ranks=1,2");
    for (const int rank : {1, 2}) ASSERT_EQ(trainers[rank]->Result().code, "OK");
    trainers[2]->Begin("leave_stay");
    EXPECT_TRUE(trainers[1]->Do("step ranks=1 times=3").ok());
    EXPECT_EQ(trainers[1]->Do("leave_stay").Field("last_to_leave"), "1");
    for (const int rank : {0, 2}) {
      EXPECT_EQ(trainers[rank]->Result().Field("last_to_leave"), "1");
    }
    ExpectAll(trainers, "broadcast 100000 1");
    ExpectAll(trainers, "allreduce 100");
  }
  EXPECT_EQ(trainers[0]->Do("next").Field("step"), "31");
  ExpectAll(trainers, "leave");
}

TEST(LeaveAndStay, ReturnsTheLastRankWhichCanBroadcastTheModel) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register");
  ExpectAll(trainers, "step");
  trainers[0]->Begin("leave_stay");
  ASSERT_EQ(trainers[2]->Do("leave_stay timeout_ms=1").reason, "WAIT_TIMEOUT");
  EXPECT_TRUE(trainers[1]->Do("step ranks=1 times=3").ok());
  trainers[2]->Begin("leave_stay");
  EXPECT_EQ(trainers[1]->Do("leave_stay").Field("last_to_leave"), "1");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(trainers[rank]->Result().Field("last_to_leave"), "1");
  }
  ExpectAll(trainers, "broadcast 100000 1");
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "leave");
}

}  // namespace
}  // namespace gradsync::fault
