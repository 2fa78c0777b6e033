// How a daemon ends whose stop hangs. Each test has a child process that ends so.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstddef>

#include "daemon/app/stop_guard.h"

namespace gradsync::daemon {
namespace {

TEST(EndHungProcessTest, NamesTheStageAndHasItsOwnExitStatus) {
  EXPECT_EXIT(EndHungProcess("stopping the workers"), testing::ExitedWithCode(kExitHung),
              "the stop hangs.*stage=.*stopping the workers");
}

// Makes stderr, which is the log, a pipe that is full and that nobody reads.
void EndWithoutAReaderOfTheLog() {
  int ends[2];
  if (pipe2(ends, O_NONBLOCK) != 0) _exit(1);
  const char bytes[4096] = {};
  for (const std::size_t size : {sizeof(bytes), std::size_t{1}}) {
    while (write(ends[1], bytes, size) > 0) {
    }
  }
  if (fcntl(ends[1], F_SETFL, 0) != 0 || dup2(ends[1], STDERR_FILENO) < 0) _exit(1);
  EndHungProcess("draining");
}

TEST(EndHungProcessTest, EndsAlthoughTheLogHangsToo) {
  EXPECT_EXIT(EndWithoutAReaderOfTheLog(), testing::KilledBySignal(SIGALRM), "");
}

// As some parents leave it.
void EndWithSigalrmIgnored() {
  signal(SIGALRM, SIG_IGN);
  sigset_t alarm_only;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  sigprocmask(SIG_BLOCK, &alarm_only, nullptr);
  EndWithoutAReaderOfTheLog();
}

TEST(EndHungProcessTest, EndsAlthoughSigalrmWasIgnored) {
  EXPECT_EXIT(EndWithSigalrmIgnored(), testing::KilledBySignal(SIGALRM), "");
}

}  // namespace
}  // namespace gradsync::daemon
