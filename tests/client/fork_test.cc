// A trainer that forks, as PyTorch's DataLoader does, against a real daemon.

#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"
#include "tests/client/job_of_threads.h"

namespace gradsync {
namespace {

bool IsForked(const absl::Status& status) {
  return status.code() == absl::StatusCode::kFailedPrecondition && ErrorReason(status) == "FORKED";
}

int Wait(pid_t child) {
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class ForkTest : public testing::Test {
 protected:
  const TestDaemon daemon_;
  const LayoutSpec spec_ = FloatBuckets(1, 10);
  JobOfThreads job_ = JoinAll(daemon_, 2, &spec_);
};

TEST_F(ForkTest, EveryCallInTheChildFailsAndDestructorsReturn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang is a failure
    Session& session = *job_.sessions[0];
    Layout& layout = *job_.layouts[0];
    char byte = 0;
    const bool all = IsForked(session.Barrier()) && IsForked(session.Broadcast(&byte, 1, 0)) &&
                     IsForked(session.AllReduce(&byte, 0, DataType::kFloat32, ReduceOp::kSum)) &&
                     IsForked(session.RegisterLayout(spec_).status()) &&
                     IsForked(session.ReplaceLayout(layout, spec_).status()) &&
                     IsForked(layout.MarkUnused(1, 0)) && IsForked(session.Leave()) &&
                     IsForked(session.LeaveAndStay().status()) &&
                     IsForked(layout.MarkReady(1, 0)) && IsForked(layout.EndStep(1)) &&
                     IsForked(layout.FinishStep(1)) && IsForked(layout.AbandonStep(1, "")) &&
                     IsForked(layout.WaitBucket(1, 0)) && IsForked(layout.WaitStep(1).status()) &&
                     IsForked(Session::Join(OptionsOf(daemon_, 0, 2)).status()) &&
                     layout.next_step() == 1 && session.rank() == 0;
    job_.sessions[0].reset();
    job_.layouts[0].reset();
    job_.layouts[1].reset();
    job_.sessions[1].reset();
    _exit(all ? 0 : 1);
  }
  EXPECT_EQ(Wait(child), 0);
  // The parent is not affected.
  OnEveryRank(2, [&](std::uint32_t rank) {
    ASSERT_TRUE(MarkAllAndEnd(job_.layouts[rank].get(), 1).ok());
    EXPECT_TRUE(job_.layouts[rank]->WaitStep(1).ok());
  });
}

// The child keeps what it inherits, and the daemon must still see the session's end.
TEST_F(ForkTest, DaemonSeesTheEndWhileAChildLives) {
  int hold[2];
  ASSERT_EQ(pipe(hold), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    char byte;
    _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);
  }
  job_.sessions[0].reset();
  const absl::Status status = job_.layouts[1]->WaitStep(1, absl::Seconds(20)).status();
  EXPECT_EQ(ErrorReason(status), "RANK_LOST") << status;
  close(hold[0]);
  close(hold[1]);
  EXPECT_EQ(Wait(child), 0);
}

}  // namespace
}  // namespace gradsync
