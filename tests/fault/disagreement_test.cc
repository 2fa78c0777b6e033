// Ranks that disagree: every rank gets the same error, which names both sides of the difference.

#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"
#include "tests/kit/deadline.h"

namespace gradsync::fault {
namespace {

void ExpectContains(const Reply& reply, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(reply.message.find(part), std::string::npos) << part << " is not in " << reply;
  }
}

TEST(LayoutMismatch, NamesTheFirstDifferentParameterAndBothRanks) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  trainers[0]->Send("register parameters=embedding:10x4,weight:4x4,bias:4");
  trainers[1]->Send("register parameters=embedding:10x4,weight:4x5,bias:5");
  std::vector<Reply> replies;
  for (const auto& trainer : trainers) {
    const Reply reply = trainer->Receive();
    EXPECT_EQ(reply.code, "FAILED_PRECONDITION") << reply;
    EXPECT_EQ(reply.reason, "LAYOUT_MISMATCH") << reply;
    ExpectContains(reply, {"weight", "[4,4]", "[4,5]", "layout 'default' differs between ranks"});
    EXPECT_EQ(reply.message.find("bias"), std::string::npos)
        << "only the first difference: " << reply;
    const std::string rank = reply.Field("rank"), other = reply.Field("other_rank");
    EXPECT_TRUE((rank == "0" && other == "1") || (rank == "1" && other == "0")) << reply;
    replies.push_back(reply);
  }
  EXPECT_EQ(replies[0].message, replies[1].message);
  // The sessions continue and can agree on another layout.
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "register layout=corrected");
  ExpectAll(trainers, "step layout=corrected");
}

TEST(LayoutMismatch, NamesTheDifferentNameTypeCountOrOperation) {
  const struct {
    const char *mine, *theirs, *names;
  } kCases[] = {
      {"parameters=w:4", "parameters=v:4", "'v'"},
      {"parameters=w:4", "parameters=w:4 dtype=float64", "float64"},
      {"parameters=w:4,b:4", "parameters=w:4", "b"},
      {"parameters=w:4", "parameters=w:4 op=sum", "sum"},
      {"buckets=2 count=10", "buckets=2 count=11", "11"},
      {"buckets=2 count=10", "buckets=3 count=10", "3"},
  };
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  int number = 0;
  for (const auto& one : kCases) {
    const std::string name = "layout=number" + std::to_string(++number);
    trainers[0]->Send("register " + name + " " + one.mine);
    trainers[1]->Send("register " + name + " " + one.theirs);
    for (const auto& trainer : trainers) {
      const Reply reply = trainer->Receive();
      EXPECT_EQ(reply.reason, "LAYOUT_MISMATCH") << reply;
      ExpectContains(reply, {one.names, "rank"});
    }
  }
}

TEST(OperationMismatch, NamesBothRanksAndBothOperations) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 3);
  trainers[0]->Begin("broadcast 100 0");
  ASSERT_EQ(daemon.Status().jobs_size(), 1);
  trainers[1]->Begin("barrier");
  std::vector<Reply> replies = {trainers[0]->Result(), trainers[1]->Result()};
  // Rank 2 calls later, when the operation has already failed.
  replies.push_back(trainers[2]->Do("barrier"));
  for (const Reply& reply : replies) {
    EXPECT_EQ(reply.code, "FAILED_PRECONDITION") << reply;
    EXPECT_EQ(reply.reason, "OPERATION_MISMATCH") << reply;
    ExpectContains(reply, {"rank 0", "rank 1", "broadcast of 100 bytes from rank 0", "barrier"});
    EXPECT_EQ(reply.message, replies[0].message);
  }
  ExpectAll(trainers, "barrier");
  ExpectAll(trainers, "allreduce 10");
}

TEST(OperationMismatch, NamesDifferentArguments) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  const struct {
    const char *mine, *theirs;
  } kCases[] = {
      {"broadcast 100 0", "broadcast 101 0"},  {"broadcast 100 0", "broadcast 100 1"},
      {"allreduce 10", "allreduce 11"},        {"allreduce 10", "allreduce 10 dtype=float64"},
      {"allreduce 10", "allreduce 10 op=sum"},
  };
  for (const auto& one : kCases) {
    trainers[0]->Send(one.mine);
    trainers[1]->Send(one.theirs);
    for (const auto& trainer : trainers) {
      const Reply reply = trainer->Receive();
      EXPECT_EQ(reply.reason, "OPERATION_MISMATCH") << reply;
      ExpectContains(reply, {"rank 0", "rank 1"});
    }
  }
  ExpectAll(trainers, "barrier");
}

TEST(StepTimeout, ReportsTheSameMissingRanksAndBucketsToEveryRank) {
  TestDaemon daemon;
  // On a busy machine the calls below take a while, and so does the whole step at the end.
  const auto trainers = JoinedTrainers(daemon, 3, "job", "step_timeout_ms=5000");
  ExpectAll(trainers, "register buckets=4");
  ExpectAll(trainers, "mark 1 0");
  for (const char* call : {"mark 1 1", "mark 1 2", "mark 1 3", "end 1"}) {
    ASSERT_TRUE(trainers[0]->Do(call).ok());
    if (std::string(call) != "end 1") {
      ASSERT_TRUE(trainers[2]->Do(call).ok());
    }
  }
  const std::vector<Reply> replies = DoAll(trainers, "wait 1");
  for (const Reply& reply : replies) {
    EXPECT_EQ(reply.code, "DEADLINE_EXCEEDED") << reply;
    EXPECT_EQ(reply.reason, "STEP_TIMEOUT") << reply;
    ExpectContains(reply, {"rank 1 has not marked bucket 1-3 ready",
                           "rank 2 has not ended the step", "void on every rank"});
    EXPECT_EQ(reply.message, replies[0].message);
    EXPECT_EQ(reply.Field("step"), "1") << reply;
  }
  for (const Reply& reply : DoAll(trainers, "step")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("step"), "2") << reply;
  }
}

TEST(Join, IsRefusedWithADifferentWorldSizeOrOptionAndNamesBoth) {
  TestDaemon daemon;
  Trainer first(daemon, 0, 2);
  ASSERT_TRUE(first.Join().ok());
  Trainer wrong(daemon, 1, 3);
  const Reply size = wrong.Join();
  EXPECT_EQ(size.code, "FAILED_PRECONDITION") << size;
  EXPECT_EQ(size.reason, "JOB_MISMATCH") << size;
  ExpectContains(size, {"world_size is 3", "have 2", "rank 1"});
  Trainer other(daemon, 1, 2, "job", "divisor=world");
  const Reply divisor = other.Join();
  EXPECT_EQ(divisor.reason, "JOB_MISMATCH") << divisor;
  ExpectContains(divisor, {"divisor is world", "have live_ranks"});
  Trainer hasty(daemon, 1, 2, "job", "step_timeout_ms=5000");
  const Reply timeout = hasty.Join();
  EXPECT_EQ(timeout.reason, "JOB_MISMATCH") << timeout;
  ExpectContains(timeout, {"step_timeout_ms is 5000"});
  // The first rank is not affected.
  Trainer second(daemon, 1, 2);
  ASSERT_TRUE(second.Join().ok());
  first.Begin("barrier");
  EXPECT_TRUE(second.Do("barrier").ok());
  EXPECT_TRUE(first.Result().ok());
}

TEST(Join, IsRefusedForAnOccupiedRankWhileTheJobForms) {
  TestDaemon daemon;
  Trainer first(daemon, 0, 2);
  ASSERT_TRUE(first.Join().ok());
  Trainer again(daemon, 0, 2);
  const Reply reply = again.Join();
  EXPECT_EQ(reply.code, "ALREADY_EXISTS") << reply;
  EXPECT_EQ(reply.reason, "RANK_OCCUPIED") << reply;
  ExpectContains(reply, {"rank 0 of job 'job'", "still forming"});
  Trainer second(daemon, 1, 2);
  ASSERT_TRUE(second.Join().ok());
  first.Begin("barrier");
  EXPECT_TRUE(second.Do("barrier").ok());
  EXPECT_TRUE(first.Result().ok());
}

TEST(Join, IsRefusedWithAnUnsupportedLossPolicyByName) {
  TestDaemon daemon;
  for (const std::string policy : {"continue"}) {
    Trainer trainer(daemon, 0, 1, "job", "policy=" + policy);
    const Reply reply = trainer.Join();
    EXPECT_EQ(reply.code, "UNIMPLEMENTED") << reply;
    EXPECT_EQ(reply.reason, "LOSS_POLICY") << reply;
    ExpectContains(reply, {"on_rank_loss=" + policy, "se abort"});
  }
  EXPECT_EQ(daemon.Status().jobs_size(), 0);
}

}  // namespace
}  // namespace gradsync::fault
