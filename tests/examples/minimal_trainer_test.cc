// The example that the README shows, run as the README says: two ranks against a daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/examples/child_group.h"
#include "client/examples/ready_socket.h"
#include "client/examples/run_directory.h"

namespace gradsync::examples {
namespace {

using EventKind = ChildGroup::EventKind;
using ::testing::UnorderedElementsAre;

TEST(MinimalTrainerTest, TwoRanksFitOneLine) {
  const absl::StatusOr<std::unique_ptr<RunDirectory>> directory = RunDirectory::Create();
  ASSERT_TRUE(directory.ok()) << directory.status();
  const std::string notify = (*directory)->File("notify.sock");
  const std::string socket = (*directory)->File("gradsyncd.sock");
  const absl::StatusOr<std::unique_ptr<ReadySocket>> ready = ReadySocket::Create(notify);
  ASSERT_TRUE(ready.ok()) << ready.status();
  const absl::StatusOr<std::unique_ptr<ChildGroup>> group = ChildGroup::Create();
  ASSERT_TRUE(group.ok()) << group.status();

  ChildGroup::Command daemon;
  daemon.arguments = {"daemon/gradsyncd", "--socket=" + socket};
  daemon.environment = {"NOTIFY_SOCKET=" + notify};
  ASSERT_TRUE((*group)->Start(daemon).ok());
  (*group)->Watch((*ready)->descriptor());

  int running = 0;
  std::vector<std::string> said;
  do {
    const absl::StatusOr<ChildGroup::Event> event = (*group)->Next(absl::Now() + absl::Minutes(1));
    ASSERT_TRUE(event.ok()) << event.status();
    ASSERT_NE(event->kind, EventKind::kDeadline);
    if (event->kind == EventKind::kReadable && (*ready)->ReadReady()) {
      for (; running < 2; ++running) {
        ChildGroup::Command trainer;
        trainer.arguments = {"client/examples/minimal_trainer"};
        trainer.environment = {
            absl::StrCat("RANK=", running), "WORLD_SIZE=2",      "TORCHELASTIC_RUN_ID=minimal",
            "MASTER_ADDR=localhost",        "MASTER_PORT=29500", "GRADSYNC_SOCKET=" + socket};
        ASSERT_TRUE((*group)->Start(trainer).ok());
      }
    } else if (event->kind == EventKind::kOutput && event->child != 0) {
      said.push_back(event->line);
    } else if (event->kind == EventKind::kError && event->child != 0) {
      ADD_FAILURE() << event->line;
    } else if (event->kind == EventKind::kExit) {
      ASSERT_NE(event->child, 0u) << "the daemon ended";
      EXPECT_EQ(event->wait_status, 0);
      --running;
    }
  } while (running > 0 || said.empty());
  EXPECT_THAT(said,
              UnorderedElementsAre("rank 0: y = 3.000 x + 2.000", "rank 1: y = 3.000 x + 2.000"));
}

}  // namespace
}  // namespace gradsync::examples
