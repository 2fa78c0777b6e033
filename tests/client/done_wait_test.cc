#include "client/src/done_wait.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "gradsync/shared_memory.h"
#include "gtest/gtest.h"
#include "tests/kit/thread_sleep.h"

namespace gradsync::client {
namespace {

TEST(DoneWaitTest, ReturnsAtOnceWhenTheStepIsReached) {
  const std::atomic<std::uint64_t> word{3};
  EXPECT_EQ(WaitDone(word, 3, absl::InfiniteDuration()), DoneWait::kReached);
  EXPECT_EQ(WaitDone(word, 2, absl::InfiniteDuration()), DoneWait::kReached);
}

TEST(DoneWaitTest, TimesOut) {
  const std::atomic<std::uint64_t> word{2};
  EXPECT_EQ(WaitDone(word, 3, absl::Milliseconds(5)), DoneWait::kTimedOut);
  EXPECT_EQ(WaitDone(word, 3, absl::ZeroDuration()), DoneWait::kTimedOut);
  EXPECT_EQ(WaitDone(word, 3, -absl::InfiniteDuration()), DoneWait::kTimedOut);
}

TEST(DoneWaitTest, PoisonReleasesEveryWaiter) {
  std::atomic<std::uint64_t> word{6};
  DoneWait results[3];
  std::thread waiters[3];
  for (int i = 0; i < 3; ++i) {
    waiters[i] = std::thread(
        [&word, &results, i] { results[i] = WaitDone(word, 7 + i, absl::InfiniteDuration()); });
  }
  PoisonDone(&word, 7);
  for (std::thread& waiter : waiters) waiter.join();
  for (const DoneWait result : results) EXPECT_EQ(result, DoneWait::kPoisoned);
}

// The daemon wakes only the first ones.
TEST(DoneWaitTest, WokenWaitersWakeTheOthers) {
  constexpr int kWaiters = 5 * kDoneWakes / 2;
  std::atomic<std::uint64_t> word{6};
  DoneSleepers sleepers{0};
  std::vector<std::atomic<pid_t>> waiting(kWaiters);
  std::vector<std::thread> waiters;
  for (std::atomic<pid_t>& one : waiting) {
    waiters.emplace_back([&] {
      one = ThisThread();
      EXPECT_EQ(WaitDone(word, 7, absl::InfiniteDuration(), &sleepers), DoneWait::kReached);
    });
  }
  while (sleepers != kWaiters) std::this_thread::yield();
  for (const std::atomic<pid_t>& one : waiting) AwaitSleep(one);
  word = 7;
  syscall(SYS_futex, &word, FUTEX_WAKE, kDoneWakes, nullptr, nullptr, 0);
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(sleepers, 0u);
}

// A waiter must not sleep forever on a word whose low half does not change.
TEST(DoneWaitTest, PoisonWithTheSameLowHalfIsSeen) {
  std::atomic<std::uint64_t> word{7};
  std::thread waiter(
      [&word] { EXPECT_EQ(WaitDone(word, 8, absl::InfiniteDuration()), DoneWait::kPoisoned); });
  PoisonDone(&word, 8);
  waiter.join();
}

// The waker is another process: the futex must not be private.
TEST(DoneWaitTest, AnotherProcessReleasesTheWait) {
  void* page = mmap(nullptr, sizeof(BucketSemaphore), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* semaphore = new (page) BucketSemaphore{};
  int to_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    _exit(read(to_child[0], &byte, 1) == 1 &&
                  WaitDone(semaphore->done, 1, absl::Seconds(30)) == DoneWait::kPoisoned
              ? 0
              : 1);
  }
  EXPECT_EQ(write(to_child[1], "x", 1), 1);
  PoisonDone(&semaphore->done, 1);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(to_child[0]);
  close(to_child[1]);
  munmap(page, sizeof(BucketSemaphore));
}

}  // namespace
}  // namespace gradsync::client
