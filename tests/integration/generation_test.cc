// A newer generation of a job takes over from an older one.

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

TEST(Generation, NewerOneEndsTheOldSessionsAndStartsAtStep1) {
  TestDaemon daemon;
  const auto old = JoinedTrainers(daemon, 2);
  ExpectAll(old, "register");
  ExpectAll(old, "step times=3");
  ASSERT_TRUE(old[0]->Do("mark 4 0").ok());
  old[0]->Begin("wait 4");
  Trainers young;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    young.push_back(std::make_unique<Trainer>(daemon, rank, 3));
    const Reply reply = young[rank]->Join();
    ASSERT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("generation"), "2") << reply;
  }
  const std::vector<Reply> replies = {old[0]->Result(), old[1]->Do("step"), old[0]->Do("barrier")};
  for (const Reply& reply : replies) {
    EXPECT_EQ(reply.code, "ABORTED") << reply;
    EXPECT_EQ(reply.reason, "SUPERSEDED") << reply;
    EXPECT_NE(reply.message.find("newer generation of job 'job' was begun by rank 0"),
              std::string::npos)
        << reply;
  }
  ExpectAll(young, "register count=10");
  for (const Reply& reply : DoAll(young, "step")) {
    EXPECT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("step"), "1") << reply;
    EXPECT_EQ(reply.Field("live_ranks"), "3") << reply;
  }
  ExpectAll(young, "leave");
}

// Short runs under one job id: the fast rank is in the next run before the slow one has ended its
// part in this one.
TEST(Generation, LeavesThoseAloneWhoStillEndTheirPart) {
  for (const char* end : {"leave", "finish"}) {
    SCOPED_TRACE(end);
    TestDaemon daemon;
    auto slow = std::make_unique<Trainer>(daemon, 1, 2);
    auto fast = std::make_unique<Trainer>(daemon, 0, 2);
    ASSERT_TRUE(slow->Join().ok());
    ASSERT_TRUE(fast->Join().ok());
    for (int run = 1; run <= 20; ++run) {
      for (const char* command : {"register", "step times=2"}) {
        for (const auto& rank : {fast.get(), slow.get()}) rank->Send(command);
        for (const auto& rank : {fast.get(), slow.get()}) {
          const Reply reply = rank->Receive();
          ASSERT_TRUE(reply.ok()) << reply;
        }
      }
      ASSERT_TRUE(fast->Do(end).ok());
      auto next_fast = std::make_unique<Trainer>(daemon, 0, 2);
      const Reply joined = next_fast->Join();
      ASSERT_TRUE(joined.ok()) << joined;
      EXPECT_EQ(joined.Field("generation"), std::to_string(run + 1));
      const Reply ended = slow->Do(end);
      ASSERT_TRUE(ended.ok()) << ended;
      fast = std::move(next_fast);
      slow = std::make_unique<Trainer>(daemon, 1, 2);
      const Reply joined_too = slow->Join();
      ASSERT_TRUE(joined_too.ok()) << joined_too;
      EXPECT_EQ(joined_too.Field("generation"), std::to_string(run + 1));
    }
  }
}

TEST(Generation, IncreasesAfterAJobEnded) {
  TestDaemon daemon;
  for (const char* generation : {"1", "2", "3"}) {
    Trainer trainer(daemon, 0, 1);
    const Reply reply = trainer.Join();
    ASSERT_TRUE(reply.ok()) << reply;
    EXPECT_EQ(reply.Field("generation"), generation);
    ASSERT_TRUE(trainer.Do("leave").ok());
  }
}

TEST(Incarnation, IsNeverReused) {
  TestDaemon daemon;
  std::uint64_t last = 0;
  for (int i = 0; i < 5; ++i) {
    Trainer trainer(daemon, 0, 1, "job" + std::to_string(i % 2));
    const Reply reply = trainer.Join();
    ASSERT_TRUE(reply.ok()) << reply;
    const std::uint64_t incarnation = std::stoull(reply.Field("incarnation"));
    EXPECT_GT(incarnation, last);
    last = incarnation;
    if (i % 2 == 0) trainer.Kill();
  }
}

}  // namespace
}  // namespace gradsync::fault
