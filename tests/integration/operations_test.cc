// Operations on the job's own channel.

#include <string>

#include "gtest/gtest.h"
#include "tests/fault/trainer.h"

namespace gradsync::fault {
namespace {

TEST(Broadcast, DeliversEverySize) {
  TestDaemon daemon({"--staging_bytes=1MiB"});
  const auto trainers = JoinedTrainers(daemon, 3);
  // Sizes: empty, one byte, less than a chunk, one chunk, and more with an uneven last chunk.
  for (const char* bytes : {"0", "1", "4095", "1048576", "1048577", "5000003"}) {
    for (const char* root : {"0", "2"}) {
      ExpectAll(trainers, std::string("broadcast ") + bytes + " " + root);
    }
  }
  ExpectAll(trainers, "leave");
}

TEST(AllReduce, IsRefusedIfLargerThanTheStagingMemoryAndTheSessionSurvives) {
  TestDaemon daemon({"--staging_bytes=1MiB"});
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "allreduce 262144");
  for (const Reply& reply : DoAll(trainers, "allreduce 262145")) {
    EXPECT_EQ(reply.code, "INVALID_ARGUMENT") << reply;
    EXPECT_NE(reply.message.find("staging memory"), std::string::npos) << reply;
  }
  ExpectAll(trainers, "barrier");
}

TEST(Operations, RunDuringStepsWhateverTheirKind) {
  TestDaemon daemon;
  const auto trainers = JoinedTrainers(daemon, 2);
  ExpectAll(trainers, "register buckets=2");
  ExpectAll(trainers, "mark 1 0");
  for (int i = 0; i < 20; ++i) {
    ExpectAll(trainers, "barrier");
    ExpectAll(trainers, "broadcast 100 " + std::to_string(i % 2));
    ExpectAll(trainers, "allreduce 3");
  }
  ExpectAll(trainers, "mark 1 1");
  ExpectAll(trainers, "end 1");
  ExpectAll(trainers, "wait 1");
  ExpectAll(trainers, "leave");
}

}  // namespace
}  // namespace gradsync::fault
