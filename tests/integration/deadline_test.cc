// Timeouts. Some change nothing and some end an operation. Each error names the missing ranks.

#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

void ExpectContains(const Reply& reply, const std::string& part) {
  EXPECT_NE(reply.message.find(part), std::string::npos) << part << " is not in " << reply;
}

TEST(WaitBucket, TimeoutNamesTheMissingRanksAndChangesNothing) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  ExpectAll(trainers, "register buckets=2");
  ASSERT_TRUE(trainers[0]->Do("mark 1 0").ok());
  ASSERT_TRUE(trainers[1]->Do("mark 1 0").ok());
  // This timeout proves that the daemon has handled rank 1's message.
  ASSERT_EQ(trainers[1]->Do("wait_bucket 1 0 timeout_ms=1").reason, "WAIT_TIMEOUT");
  for (int i = 0; i < 3; ++i) {
    const Reply reply = trainers[0]->Do("wait_bucket 1 0 timeout_ms=20");
    EXPECT_EQ(reply.code, "DEADLINE_EXCEEDED") << reply;
    EXPECT_EQ(reply.reason, "WAIT_TIMEOUT") << reply;
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_EQ(reply.Field("bucket"), "0") << reply;
    ExpectContains(reply, "rank 2 has not marked bucket 0-1 ready");
    ExpectContains(reply, "rank 1 has not marked bucket 1 ready");
  }
  const Reply step = trainers[0]->Do("wait 1 timeout_ms=20");
  EXPECT_EQ(step.reason, "WAIT_TIMEOUT") << step;
  // The step is right when the missing rank comes.
  ASSERT_TRUE(trainers[2]->Do("mark 1 0").ok());
  for (const auto& trainer : trainers) EXPECT_TRUE(trainer->Do("wait_bucket 1 0").ok());
  ExpectAll(trainers, "mark 1 1");
  ExpectAll(trainers, "end 1");
  ExpectAll(trainers, "wait 1");
}

TEST(RegisterLayout, TimeoutNamesTheMissingRanks) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  trainers[0]->Begin("register timeout_ms=200");
  const Reply reply = trainers[0]->Result();
  EXPECT_EQ(reply.code, "DEADLINE_EXCEEDED") << reply;
  EXPECT_EQ(reply.reason, "LAYOUT_TIMEOUT") << reply;
  ExpectContains(reply, "not registered by rank 1, 2");
  // Late ranks get the same error. Another layout works.
  EXPECT_EQ(trainers[1]->Do("register").reason, "LAYOUT_TIMEOUT");
  ExpectAll(trainers, "register layout=again");
  ExpectAll(trainers, "step layout=again");
}

TEST(Barrier, TimeoutNamesTheMissingRanksOnEveryRank) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 4);
  trainers[2]->Send("barrier");
  trainers[0]->Send("barrier timeout_ms=1500");  // on a busy machine the other one may come later
  for (const int rank : {0, 2}) {
    const Reply reply = trainers[rank]->Receive();
    EXPECT_EQ(reply.code, "DEADLINE_EXCEEDED") << reply;
    EXPECT_EQ(reply.reason, "OPERATION_TIMEOUT") << reply;
    ExpectContains(reply, "waited for rank 1, 3.");
    ExpectContains(reply, "barrier");
  }
  for (const int rank : {1, 3}) {
    const Reply late = trainers[rank]->Do("barrier");
    EXPECT_EQ(late.reason, "OPERATION_TIMEOUT") << late;
    ExpectContains(late, rank == 1 ? "for rank 1 (this rank), 3." : "for rank 1, 3 (this rank).");
  }
  ExpectAll(trainers, "barrier");
}

TEST(Broadcast, TimeoutNamesTheMissingRoot) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  const Reply reply = trainers[0]->Do("broadcast 100 1 timeout_ms=100");
  EXPECT_EQ(reply.reason, "OPERATION_TIMEOUT") << reply;
  ExpectContains(reply, "waited for rank 1");
  EXPECT_EQ(trainers[1]->Do("broadcast 100 1").reason, "OPERATION_TIMEOUT");
  ExpectAll(trainers, "broadcast 100 1");
}

TEST(LeaveAndStay, CanBeRepeatedAfterATimeout) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  const Reply reply = trainers[0]->Do("leave_stay timeout_ms=20");
  EXPECT_EQ(reply.code, "DEADLINE_EXCEEDED") << reply;
  EXPECT_EQ(reply.reason, "WAIT_TIMEOUT") << reply;
  trainers[0]->Begin("leave_stay");
  EXPECT_EQ(trainers[1]->Do("leave_stay").Field("last_to_leave"), "1");
  EXPECT_EQ(trainers[0]->Result().Field("last_to_leave"), "1");
}

}  // namespace
}  // namespace gradsync::fault
