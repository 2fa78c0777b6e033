#include "daemon/arena/semaphore_page.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace gradsync::daemon {
namespace {

const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

std::shared_ptr<SemaphorePage> Create(std::size_t buckets) {
  absl::StatusOr<std::shared_ptr<SemaphorePage>> page = SemaphorePage::Create(buckets);
  EXPECT_TRUE(page.ok()) << page.status();
  return page.ok() ? *page : nullptr;
}

// The trainer's side. Uses only the descriptor and shared_memory.h.
class TrainerView {
 public:
  explicit TrainerView(const SemaphorePage& page)
      : bytes_(page.bytes()),
        address_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, page.fd(), 0)) {
    EXPECT_NE(address_, MAP_FAILED);
  }
  ~TrainerView() { munmap(address_, bytes_); }

  SemaphorePageHeader* header() { return static_cast<SemaphorePageHeader*>(address_); }
  BucketSemaphore* bucket(std::size_t i) {
    return reinterpret_cast<BucketSemaphore*>(header() + 1) + i;
  }

 private:
  const std::size_t bytes_;
  void* const address_;
};

std::size_t AllocatedBytes(const SemaphorePage& page) {
  struct stat file;
  EXPECT_EQ(fstat(page.fd(), &file), 0);
  return static_cast<std::size_t>(file.st_blocks) * 512;
}

// Sleeps on the word until it releases `step`; false after ten seconds. Async-signal-safe, because
// a forked child calls it.
bool WaitDone(std::atomic<std::uint64_t>* word, std::uint64_t step) {
  for (;;) {
    const std::uint64_t seen = word->load(std::memory_order_acquire);
    if (SemaphoreReleased(seen, step)) return true;
    const timespec timeout = {10, 0};
    if (syscall(SYS_futex, word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &timeout, nullptr,
                0) != 0 &&
        errno == ETIMEDOUT) {
      return false;
    }
  }
}

// Returns when `pid` is inside futex(2).
void AwaitParked(pid_t pid) {
  const std::string prefix = std::to_string(SYS_futex) + " ";
  for (;;) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/syscall");
    std::string line;
    if (std::getline(file, line) && line.compare(0, prefix.size(), prefix) == 0) return;
    sched_yield();
  }
}

TEST(SemaphorePageTest, SizesFollowTheLayout) {
  EXPECT_EQ(Create(0)->bytes(), kPage);
  EXPECT_EQ(Create(63)->bytes(), kPage);
  EXPECT_EQ(Create(64)->bytes(), 2 * kPage);
  EXPECT_EQ(Create(64)->buckets(), 64u);
}

TEST(SemaphorePageTest, ImpossibleSizesAreRefused) {
  EXPECT_EQ(SemaphorePage::Create(~std::size_t{0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SemaphorePage::Create(~std::size_t{0} / 64 - 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SemaphorePageTest, DescriptorIsSealedAndClosedOnExec) {
  const std::shared_ptr<SemaphorePage> page = Create(3);
  EXPECT_EQ(ftruncate(page->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  constexpr int kNeverExecutable = 0x20;  // F_SEAL_EXEC, which Linux 6.3 adds
  EXPECT_EQ(fcntl(page->fd(), F_GET_SEALS) & ~kNeverExecutable, F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_EQ(fcntl(page->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(SemaphorePageTest, TrainerAllocatesItsPages) {
  const auto page = SemaphorePage::Create(100, SemaphorePage::Pages::kOfTrainer);
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(AllocatedBytes(**page), 0u);
  {
    TrainerView trainer(**page);
    trainer.header()->void_step = 0;  // populates the first page
  }
  ASSERT_EQ(fcntl((*page)->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  EXPECT_EQ((*page)->Accept().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(AllocatedBytes(**page), kPage);

  const auto whole = SemaphorePage::Create(100, SemaphorePage::Pages::kOfTrainer);
  ASSERT_TRUE(whole.ok()) << whole.status();
  TrainerView trainer(**whole);
  trainer.header()->void_step = 0;
  trainer.bucket(99)->done = 0;
  EXPECT_EQ((*whole)->Accept().code(), absl::StatusCode::kFailedPrecondition) << "not sealed";
  ASSERT_EQ(fcntl((*whole)->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  const absl::Status accepted = (*whole)->Accept();
  EXPECT_TRUE(accepted.ok()) << accepted;
  (*whole)->SignalDone(99, 1);
  EXPECT_EQ(trainer.bucket(99)->done, 1u);
}

TEST(SemaphorePageTest, WordsBeginAtZeroAndDoNotOverlap) {
  const std::shared_ptr<SemaphorePage> page = Create(100);
  TrainerView trainer(*page);
  EXPECT_EQ(trainer.header()->void_step, 0u);
  for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(trainer.bucket(i)->done, 0u);
  for (std::size_t i = 0; i < 100; ++i) page->SignalDone(i, 1000 + i);
  page->DeclareVoid(17);
  EXPECT_EQ(trainer.header()->void_step, 17u);
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(trainer.bucket(i)->done, 1000 + i);
    EXPECT_EQ(trainer.bucket(i)->ready, 0u);
  }
}

TEST(SemaphorePageTest, StepWithoutBucketsCanBeVoid) {
  const std::shared_ptr<SemaphorePage> page = Create(0);
  TrainerView trainer(*page);
  page->DeclareVoid(3);
  EXPECT_EQ(trainer.header()->void_step, 3u);
}

// The daemon only writes these words, so a trainer that writes to them cannot influence it.
TEST(SemaphorePageTest, TrainersWritesAreOverwritten) {
  const std::shared_ptr<SemaphorePage> page = Create(1);
  TrainerView trainer(*page);
  trainer.bucket(0)->done = ~std::uint64_t{0};
  page->SignalDone(0, 2);
  EXPECT_EQ(trainer.bucket(0)->done, 2u);
}

TEST(SemaphorePageTest, ClosedPageIsNotWritten) {
  const auto page = Create(1);
  TrainerView trainer(*page);
  page->SignalDone(0, 4);
  page->Close();
  page->DeclareVoid(5);
  page->SignalDone(0, 5);
  EXPECT_EQ(trainer.bucket(0)->done.load(), 4u);
  EXPECT_EQ(trainer.header()->void_step.load(), 0u);
}

// A trainer may let thousands of threads wait; the thread that signals has other users to serve.
TEST(SemaphorePageTest, SignalWakesABoundedNumberOfWaiters) {
  constexpr int kWaiters = kDoneWakes + 4;
  const std::shared_ptr<SemaphorePage> page = Create(1);
  TrainerView trainer(*page);
  auto* const word = &trainer.bucket(0)->done;
  std::vector<pid_t> children;
  for (int i = 0; i < kWaiters; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) _exit(WaitDone(word, 1) ? 0 : 1);
    children.push_back(child);
  }
  for (const pid_t child : children) AwaitParked(child);
  page->SignalDone(0, 1);
  EXPECT_EQ(syscall(SYS_futex, word, FUTEX_WAKE, kWaiters, nullptr, nullptr, 0), 4);
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

TEST(SemaphorePageTest, SignalWakesEveryWaiterInOtherProcesses) {
  constexpr std::uint64_t kStep = (std::uint64_t{1} << 32) + 5;  // beyond the futex's 32 bits
  const std::shared_ptr<SemaphorePage> page = Create(4);
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    TrainerView trainer(*page);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const bool released = WaitDone(&trainer.bucket(2)->done, kStep);
      const bool is_void = trainer.header()->void_step.load(std::memory_order_relaxed) == kStep;
      _exit(released && is_void ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) AwaitParked(child);
  page->SignalDone(1, kStep);  // wakes nobody: the waiters wait for another bucket
  page->DeclareVoid(kStep);
  page->SignalDone(2, kStep);
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

}  // namespace
}  // namespace gradsync::daemon
