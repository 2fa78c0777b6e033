#include "daemon/arena/host_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <string>

#include "daemon/base/error.h"
#include "tests/kit/deadline.h"
#include "tests/kit/in_child.h"

namespace gradsync::daemon {
namespace {

const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

std::shared_ptr<HostArena> Create(std::size_t bytes) {
  absl::StatusOr<std::shared_ptr<HostArena>> arena = HostArena::Create("arena-test", bytes);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return arena.ok() ? *arena : nullptr;
}

// The trainer's side: maps the descriptor and writes to the memory.
class TrainerMapping {
 public:
  explicit TrainerMapping(const HostArena& arena)
      : fd_(arena.fd()),
        bytes_(arena.bytes()),
        data_(static_cast<std::byte*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd(), 0))) {
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~TrainerMapping() { munmap(data_, bytes_); }
  void Populate(std::size_t bytes) { std::memset(data_, 1, bytes); }
  void PopulateAndSeal() {
    Populate(bytes_);
    EXPECT_EQ(fcntl(fd_, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  }
  std::byte* data() { return data_; }

 private:
  const int fd_;
  const std::size_t bytes_;
  std::byte* const data_;
};

std::int64_t AllocatedBlocks(const HostArena& arena) {
  struct stat file;
  EXPECT_EQ(fstat(arena.fd(), &file), 0);
  return file.st_blocks;
}

// Frees the arena's first page, as a trainer can. Returns 0 or errno.
int PunchHole(const HostArena& arena) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return fallocate(arena.fd(), mode, 0, static_cast<off_t>(kPage)) == 0 ? 0 : errno;
}

// How many pages of the arena this process has in its page tables.
std::size_t MappedPages(const HostArena& arena) {
  // /proc/self/pagemap: bit 63 of a page's entry says that this process maps it.
  const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  EXPECT_GE(pagemap, 0);
  std::size_t mapped = 0;
  for (std::size_t page = 0; page < arena.bytes() / kPage; ++page) {
    std::uint64_t entry = 0;
    const auto address = reinterpret_cast<std::uintptr_t>(arena.data()) + page * kPage;
    EXPECT_EQ(pread(pagemap, &entry, sizeof(entry), static_cast<off_t>(address / kPage * 8)), 8);
    mapped += entry >> 63;
  }
  close(pagemap);
  return mapped;
}

TEST(HostArenaTest, SizeIsRoundedUpToPages) {
  EXPECT_EQ(Create(1)->bytes(), kPage);
  EXPECT_EQ(Create(kPage)->bytes(), kPage);
  EXPECT_EQ(Create(kPage + 1)->bytes(), 2 * kPage);
  EXPECT_EQ(Create(0)->bytes(), kPage);
}

TEST(HostArenaTest, ImpossibleSizesAreRefused) {
  for (const std::size_t bytes : {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 63,
                                  (std::size_t{1} << 63) - kPage + 1}) {
    EXPECT_EQ(HostArena::Create("huge", bytes).status().code(), absl::StatusCode::kInvalidArgument)
        << bytes;
  }
}

TEST(HostArenaTest, TooManyOpenFilesAreNamed) {
  rlimit limit{}, none{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  none.rlim_max = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto arena = HostArena::Create("arena-test", kPage);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(arena.status())) << arena.status();
  EXPECT_EQ(DetailsOf(arena.status()).reason, "OPEN_FILES");
}

TEST(HostArenaTest, RefusedMemoryIsNamed) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit limit{}, none{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  none.rlim_max = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto arena = HostArena::Create("arena-test", kPage);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(arena.status())) << arena.status();
  EXPECT_EQ(DetailsOf(arena.status()).reason, "MEMORY");
  EXPECT_NE(arena.status().message().find("ulimit -f"), absl::string_view::npos) << arena.status();
}

TEST(HostArenaTest, LongNamesAreTruncated) {
  EXPECT_TRUE(HostArena::Create(std::string(1000, 'n'), 1).ok());
}

TEST(HostArenaTest, CreationTouchesNoPage) {
  const std::shared_ptr<HostArena> arena = Create(std::size_t{1} << 36);  // 64 GiB cost nothing
  EXPECT_EQ(AllocatedBlocks(*arena), 0);
  EXPECT_EQ(arena->data(), nullptr);
}

TEST(HostArenaTest, TrainerCannotResizeTheArena) {
  const std::shared_ptr<HostArena> arena = Create(2 * kPage);
  const int fd = dup(arena->fd());  // a descriptor like the one a trainer gets
  for (const std::size_t bytes : {std::size_t{0}, kPage, 3 * kPage}) {
    EXPECT_EQ(ftruncate(fd, static_cast<off_t>(bytes)), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(fallocate(fd, 0, 0, static_cast<off_t>(3 * kPage)), -1);
  EXPECT_EQ(errno, EPERM);
  close(fd);
}

TEST(HostArenaTest, DescriptorIsClosedOnExecAndWithTheArena) {
  std::shared_ptr<HostArena> arena = Create(kPage);
  const int fd = arena->fd();
  EXPECT_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  arena.reset();
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(HostArenaTest, UnpopulatedArenaIsRefusedWithBothSizes) {
  const std::shared_ptr<HostArena> arena = Create(8 * kPage);
  TrainerMapping trainer(*arena);
  trainer.Populate(3 * kPage);
  ASSERT_EQ(fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  const absl::Status status = arena->Accept();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find(std::to_string(3 * kPage) + " of " + std::to_string(8 * kPage)),
            std::string::npos)
      << status;
  EXPECT_EQ(arena->data(), nullptr);
  EXPECT_EQ(AllocatedBlocks(*arena), static_cast<std::int64_t>(3 * kPage / 512));
}

TEST(HostArenaTest, ArenaThatIsNotSealedIsRefused) {
  for (const int seals : {0, F_SEAL_SEAL, F_SEAL_FUTURE_WRITE}) {
    const std::shared_ptr<HostArena> arena = Create(kPage);
    TrainerMapping(*arena).Populate(kPage);
    ASSERT_EQ(fcntl(arena->fd(), F_ADD_SEALS, seals), 0);
    const absl::Status status = arena->Accept();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(status.message().find("not sealed"), std::string::npos) << status;
    EXPECT_EQ(arena->data(), nullptr);
  }
}

// Otherwise the daemon would allocate the freed pages, and pay for them.
TEST(HostArenaTest, TrainerCannotFreePagesOfAnAcceptedArena) {
  for (const auto faults : {HostArena::Faults::kNow, HostArena::Faults::kLater}) {
    const std::shared_ptr<HostArena> arena = Create(8 * kPage);
    TrainerMapping trainer(*arena);
    trainer.PopulateAndSeal();
    ASSERT_TRUE(arena->Accept(faults).ok());
    EXPECT_EQ(PunchHole(*arena), EPERM);
    EXPECT_EQ(madvise(trainer.data(), kPage, MADV_REMOVE), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd(), 0), MAP_FAILED);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(AllocatedBlocks(*arena), static_cast<std::int64_t>(8 * kPage / 512));
    trainer.data()[0] = std::byte{5};
    EXPECT_EQ(arena->data()[0], std::byte{5});
  }
}

TEST(HostArenaTest, ArenaWithAHoleIsRefused) {
  const std::shared_ptr<HostArena> arena = Create(8 * kPage);
  TrainerMapping trainer(*arena);
  trainer.Populate(8 * kPage);
  EXPECT_EQ(PunchHole(*arena), 0);
  ASSERT_EQ(fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  EXPECT_EQ(arena->Accept().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(arena->data(), nullptr);
}

// A huge page behind the end would count as allocated, in the place of pages that are missing.
TEST(HostArenaTest, NoHugePageLiesBehindTheEnd) {
  constexpr std::size_t kHuge = SealedMemory::kHugePage;
  EXPECT_EQ(Create(kHuge)->bytes(), kHuge);
  EXPECT_EQ(Create(kHuge + 1)->bytes(), 2 * kHuge);
  EXPECT_EQ(Create(5 * kHuge - kPage)->bytes(), 5 * kHuge);
}

TEST(HostArenaTest, MappingIsSharedWithTheTrainer) {
  const std::shared_ptr<HostArena> arena = Create(3 * kPage);
  TrainerMapping trainer(*arena);
  trainer.PopulateAndSeal();
  ASSERT_TRUE(arena->Accept().ok());
  ASSERT_NE(arena->data(), nullptr);
  EXPECT_EQ(arena->data()[3 * kPage - 1], std::byte{1});
  arena->data()[5] = std::byte{7};
  EXPECT_EQ(trainer.data()[5], std::byte{7});
  EXPECT_EQ(arena->Accept().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(HostArenaTest, AcceptingFillsThePageTables) {
  const std::shared_ptr<HostArena> arena = Create(16 * kPage);
  TrainerMapping(*arena).PopulateAndSeal();
  ASSERT_TRUE(arena->Accept().ok());
  EXPECT_EQ(MappedPages(*arena), 16u);
}

TEST(HostArenaTest, AcceptingInPiecesFillsThePageTables) {
  const std::shared_ptr<HostArena> arena = Create(5 * kPage);
  TrainerMapping(*arena).PopulateAndSeal();
  for (const bool last : {false, false, true}) {
    const absl::StatusOr<bool> accepted = arena->AcceptNext(2 * kPage);
    ASSERT_TRUE(accepted.ok()) << accepted.status();
    EXPECT_EQ(*accepted, last);
    EXPECT_EQ(arena->data() != nullptr, last);
  }
  EXPECT_EQ(MappedPages(*arena), 5u);
  EXPECT_EQ(arena->AcceptNext(2 * kPage).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(HostArenaTest, FirstPieceOfAnUnpopulatedArenaIsRefused) {
  const std::shared_ptr<HostArena> arena = Create(5 * kPage);
  TrainerMapping(*arena).Populate(4 * kPage);
  ASSERT_EQ(fcntl(arena->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL), 0);
  EXPECT_EQ(arena->AcceptNext(kPage).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(AllocatedBlocks(*arena), static_cast<std::int64_t>(4 * kPage / 512));
}

TEST(HostArenaTest, TrainersMappingOutlivesTheArena) {
  std::shared_ptr<HostArena> arena = Create(kPage);
  TrainerMapping trainer(*arena);
  trainer.PopulateAndSeal();
  ASSERT_TRUE(arena->Accept().ok());
  arena->data()[0] = std::byte{9};
  arena.reset();
  EXPECT_EQ(trainer.data()[0], std::byte{9});
}

template <typename Condition>
bool HoldsInChild(const Condition& holds) {
  return InChild([&] { return holds() ? 0 : 1; }) == 0;
}

TEST(HostArenaTest, CanBeMadeWhereTheKernelWantsNoExecutableMemory) {
  const char* const kSetting = "/proc/sys/vm/memfd_noexec";
  if (geteuid() != 0 || access(kSetting, W_OK) != 0) {
    GTEST_SKIP() << "needs root, and Linux 6.3";
  }
  // The setting belongs to a PID namespace, which only the next child enters.
  EXPECT_TRUE(HoldsInChild([&] {
    return unshare(CLONE_NEWPID) == 0 && HoldsInChild([&] {
             std::ofstream(kSetting) << 2;
             std::string setting;
             std::ifstream(kSetting) >> setting;
             return setting == "2" && HostArena::Create("arena-test", kPage).ok();
           });
  }));
}

TEST(HostArenaTest, SaysThatTheProcessHasTooManyMappings) {
  if (kScale != 1) GTEST_SKIP() << "a sanitizer cannot go on without memory";
  EXPECT_TRUE(HoldsInChild([] {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_AS, &none);
    const auto arena = HostArena::Create("arena-test", kPage);
    return DetailsOf(arena.status()).reason == reason::kMemory;
  }));
}

}  // namespace
}  // namespace gradsync::daemon
