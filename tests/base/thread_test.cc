// What happens when no thread can be started. Each test runs in a child process that may have none.
// Outside Bazel's sandbox: inside it root stays root, who may have threads without end.

#include "daemon/base/thread.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>

#include "absl/strings/match.h"
#include "daemon/base/executor.h"

namespace gradsync::daemon {
namespace {

constexpr uid_t kUser = 34568;

// From now on this process gets no thread.
void GiveUpThreads() {
  const rlimit none{0, 0};
  if (setrlimit(RLIMIT_NPROC, &none) != 0) std::abort();
  if (geteuid() == 0 && setresuid(kUser, kUser, kUser) != 0) std::abort();
}

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
  GiveUpThreads();
  const bool said = SaysSo(StartThread([] {}).status()) && SaysSo(SerialExecutor::Start().status());
  _exit(said ? 0 : 1);
}
TEST(StartThreadTest, FailsIfThereIsNoThread) {
  EXPECT_EXIT(StartWithout(), testing::ExitedWithCode(0), "");
}

void RunWithout() {
  int ran = 0;
  {
    std::optional<ConcurrentExecutor> executor(8);
    GiveUpThreads();
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
