#include "client/examples/child_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "client/examples/ready_socket.h"
#include "client/examples/run_directory.h"

namespace gradsync::examples {
namespace {

using EventKind = ChildGroup::EventKind;
using ::testing::HasSubstr;

class ChildGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<ChildGroup>> group = ChildGroup::Create();
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
  }

  ChildGroup::Id Shell(const std::string& script, std::vector<std::string> environment = {}) {
    ChildGroup::Command command;
    command.arguments = {"/bin/sh", "-c", script};
    command.environment = std::move(environment);
    const absl::StatusOr<ChildGroup::Id> id = group_->Start(command);
    EXPECT_TRUE(id.ok()) << id.status();
    return *id;
  }

  ChildGroup::Event Next() {
    absl::StatusOr<ChildGroup::Event> event = group_->Next(absl::Now() + absl::Seconds(30));
    EXPECT_TRUE(event.ok()) << event.status();
    return *event;
  }

  std::unique_ptr<ChildGroup> group_;
};

bool IsGone(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

TEST_F(ChildGroupTest, TellsEveryLineThenTheEnd) {
  const ChildGroup::Id id = Shell("echo one; printf 'two\\nthree'; exit 3");
  for (const char* line : {"one", "two", "three"}) {
    const ChildGroup::Event event = Next();
    EXPECT_EQ(event.kind, EventKind::kOutput);
    EXPECT_EQ(event.line, line);
  }
  const ChildGroup::Event event = Next();
  EXPECT_EQ(event.kind, EventKind::kExit);
  EXPECT_EQ(event.child, id);
  EXPECT_EQ(DescribeExit(event.wait_status), "exited with code 3");
  EXPECT_FALSE(group_->running(id));
}

TEST_F(ChildGroupTest, KeepsErrorOutputApart) {
  Shell("echo trouble >&2");
  const ChildGroup::Event event = Next();
  EXPECT_EQ(event.kind, EventKind::kError);
  EXPECT_EQ(event.line, "trouble");
}

TEST_F(ChildGroupTest, ClosingTheInputIsAnEnd) {
  const ChildGroup::Id id = Shell("echo waiting; cat; echo over");
  EXPECT_EQ(Next().line, "waiting");
  group_->CloseInput(id);
  EXPECT_EQ(Next().line, "over");
}

TEST_F(ChildGroupTest, SetsTheEnvironmentOverItsOwn) {
  setenv("CHILD_GROUP_A", "parent", 1);
  setenv("CHILD_GROUP_B", "parent", 1);
  Shell("echo $CHILD_GROUP_A $CHILD_GROUP_B", {"CHILD_GROUP_A=child"});
  EXPECT_EQ(Next().line, "child parent");
}

TEST_F(ChildGroupTest, NamesAProgramThatIsNotThere) {
  ChildGroup::Command command;
  command.arguments = {"/no/such/program"};
  const absl::Status status = group_->Start(command).status();
  EXPECT_EQ(status.message(), "cannot run /no/such/program: No such file or directory");
}

TEST_F(ChildGroupTest, SaysHowAChildWasKilled) {
  const ChildGroup::Id id = Shell("echo here; exec cat");
  EXPECT_EQ(Next().line, "here");
  group_->Kill(id, SIGKILL);
  const ChildGroup::Event event = Next();
  EXPECT_EQ(event.kind, EventKind::kExit);
  EXPECT_EQ(DescribeExit(event.wait_status), "was killed by signal 9 (Killed)");
}

TEST_F(ChildGroupTest, SignalsToThisProcessAreEvents) {
  kill(getpid(), SIGTERM);
  const ChildGroup::Event event = Next();
  EXPECT_EQ(event.kind, EventKind::kSignal);
  EXPECT_EQ(event.number, SIGTERM);
}

TEST_F(ChildGroupTest, ChildrenDoNotInheritTheSignalMask) {
  const ChildGroup::Id id = Shell("echo here; exec cat");
  EXPECT_EQ(Next().line, "here");
  group_->Kill(id, SIGTERM);
  EXPECT_TRUE(WIFSIGNALED(Next().wait_status));
}

TEST_F(ChildGroupTest, ADeadlinePasses) {
  Shell("exec cat");
  const absl::StatusOr<ChildGroup::Event> event = group_->Next(absl::Now());
  ASSERT_TRUE(event.ok());
  EXPECT_EQ(event->kind, EventKind::kDeadline);
}

TEST_F(ChildGroupTest, WatchesOtherDescriptors) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  group_->Watch(ends[0]);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  const ChildGroup::Event event = Next();
  EXPECT_EQ(event.kind, EventKind::kReadable);
  EXPECT_EQ(event.number, ends[0]);
  group_->Unwatch(ends[0]);
  EXPECT_EQ(group_->Next(absl::Now())->kind, EventKind::kDeadline);
  close(ends[0]);
  close(ends[1]);
}

TEST_F(ChildGroupTest, ItsEndIsTheirs) {
  const ChildGroup::Id polite = Shell("echo here; exec cat");
  EXPECT_EQ(Next().line, "here");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  // Ignores SIGTERM and the end of its input, and so does what it started.
  const ChildGroup::Id stubborn =
      Shell("trap '' TERM; tail -f /dev/null & echo there; while :; do wait; done");
  close(ends[1]);
  EXPECT_EQ(Next().line, "there");
  const pid_t pids[] = {group_->pid(polite), group_->pid(stubborn)};
  group_->Stop(absl::Milliseconds(200));
  for (pid_t pid : pids) EXPECT_TRUE(IsGone(pid));
  // The pipe ends when the last process that holds it has.
  char byte;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  close(ends[0]);
}

TEST_F(ChildGroupTest, ADeadParentTakesItsChildrenAlong) {
  // A launcher of its own, killed without a chance to clean up.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    absl::StatusOr<std::unique_ptr<ChildGroup>> group = ChildGroup::Create();
    ChildGroup::Command command;
    command.arguments = {"/bin/sh", "-c", "exec cat >&9"};
    dup2(ends[1], 9);
    close(ends[0]);
    close(ends[1]);
    if (!(*group)->Start(command).ok()) _exit(1);
    kill(getpid(), SIGKILL);
  }
  close(ends[1]);
  int status = 0;
  ASSERT_EQ(waitpid(launcher, &status, 0), launcher);
  EXPECT_TRUE(WIFSIGNALED(status));
  // The pipe ends when the last process that holds it has.
  char byte;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  close(ends[0]);
}

TEST(RunDirectoryTest, GoesWithAllThatIsInIt) {
  std::string path;
  {
    const absl::StatusOr<std::unique_ptr<RunDirectory>> directory = RunDirectory::Create();
    ASSERT_TRUE(directory.ok()) << directory.status();
    path = (*directory)->path();
    EXPECT_LT((*directory)->File("gradsyncd-fd.sock").size(), 108u);
    const absl::StatusOr<std::unique_ptr<ReadySocket>> socket =
        ReadySocket::Create((*directory)->File("notify.sock"));
    ASSERT_TRUE(socket.ok()) << socket.status();
    EXPECT_FALSE((*socket)->ReadReady());
    EXPECT_EQ(access(path.c_str(), F_OK), 0);
  }
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(RunDirectoryTest, NamesADirectoryThatIsNotWritable) {
  const char* former = getenv("TMPDIR");
  const std::string kept = former == nullptr ? "" : former;
  setenv("TMPDIR", "/proc", 1);
  EXPECT_THAT(std::string(RunDirectory::Create().status().message()),
              HasSubstr("cannot make a directory /proc/gradsync-"));
  former == nullptr ? unsetenv("TMPDIR") : setenv("TMPDIR", kept.c_str(), 1);
}

}  // namespace
}  // namespace gradsync::examples
