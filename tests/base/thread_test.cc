// What happens when no thread can be started. Each test runs in a child process that may have none.
// Outside Bazel's sandbox: inside it root stays root, who may have threads without end.

#include "daemon/base/thread.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <optional>
#include <thread>

#include "absl/strings/match.h"
#include "daemon/base/executor.h"
#include "tests/kit/limit_threads.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kUser = 34568;  // no other test program has it

bool SaysSo(const absl::Status& status) {
  return absl::IsResourceExhausted(status) && absl::StrContains(status.message(), "TasksMax=");
}

TEST(StartThreadTest, RunsTheBody) {
  bool ran = false;
  auto thread = StartThread([&] { ran = true; });
  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_TRUE(ran);
}

void StartWithout() {
  LimitThreads(0, kUser);
  const bool said = SaysSo(StartThread([] {}).status()) && SaysSo(SerialExecutor::Start().status());
  _exit(said ? 0 : 1);
}
TEST(StartThreadTest, FailsIfThereIsNoThread) {
  EXPECT_EXIT(StartWithout(), testing::ExitedWithCode(0), "");
}

void StartWithFew() {
  LimitThreads(1 + 5, kUser);
  const bool said = SaysSo(StartThread([] {}).status());
  std::thread([] {}).join();
  _exit(said ? 0 : 1);
}
TEST(StartThreadTest, LeavesSomeToGrpc) {
  if (geteuid() != 0) GTEST_SKIP() << "the user's other processes would count";
  EXPECT_EXIT(StartWithFew(), testing::ExitedWithCode(0), "");
}

// The only thread left is taken, and comes free again.
void StartWhenFree() {
  LimitThreads(1 + 1, kUser);
  for (int i = 0; i < 200; ++i) {
    std::promise<void> end;
    std::thread taken([ended = end.get_future()] { ended.wait(); });
    end.set_value();
    std::thread grpcs([] {});
    taken.join();
    grpcs.join();
  }
  _exit(0);
}
TEST(StartThreadTest, AThreadOfGrpcIsTriedAgain) {
  if (geteuid() != 0) GTEST_SKIP() << "the user's other processes would count";
  EXPECT_EXIT(StartWhenFree(), testing::ExitedWithCode(0), "");
}

void StartWithoutGrpc() {
  LimitThreads(1 + 1, kUser);
  LeaveNoThreadsToGrpc();
  auto thread = StartThread([] {});
  if (!thread.ok()) _exit(1);
  thread->join();
  _exit(0);
}
TEST(StartThreadTest, LeavesNoneWhereThereIsNoGrpc) {
  if (geteuid() != 0) GTEST_SKIP() << "the user's other processes would count";
  EXPECT_EXIT(StartWithoutGrpc(), testing::ExitedWithCode(0), "");
}

void RunWithout() {
  int ran = 0;
  {
    std::optional<ConcurrentExecutor> executor(8);
    LimitThreads(0, kUser);
    for (int i = 0; i < 10; ++i) {
      executor->Run([&] {
        ++ran;
        executor->Run([&] { ++ran; });
      });
    }
  }
  _exit(ran == 20 ? 0 : 1);
}
TEST(ConcurrentExecutorTest, RunsEverythingOnOneThreadIfThereAreNoMore) {
  EXPECT_EXIT(RunWithout(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace gradsync::daemon
