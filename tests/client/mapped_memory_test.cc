#include "client/src/mapped_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/src/unix_socket.h"
#include "gtest/gtest.h"

namespace gradsync::client {
namespace {

FileDescriptor Memfd(off_t bytes, int seals) {
  FileDescriptor memfd(memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(memfd.get(), bytes), 0);
  EXPECT_EQ(fcntl(memfd.get(), F_ADD_SEALS, seals), 0);
  return memfd;
}

std::int64_t AllocatedBytes(const FileDescriptor& memfd) {
  struct stat status {};
  EXPECT_EQ(fstat(memfd.get(), &status), 0);
  return status.st_blocks * 512;
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

TEST(MappedMemoryTest, IsSharedAndZero) {
  const FileDescriptor memfd = Memfd(8192, kSeals);
  const auto memory = MappedMemory::Map(memfd.get(), 8192, "arena");
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->size(), 8192u);
  EXPECT_EQ((*memory)->data()[8191], std::byte{0});
  (*memory)->data()[8191] = std::byte{7};
  char byte = 0;
  EXPECT_EQ(pread(memfd.get(), &byte, 1, 8191), 1);
  EXPECT_EQ(byte, 7);
}

TEST(MappedMemoryTest, PopulateAllocatesAndSealsEveryPage) {
  const FileDescriptor memfd = Memfd(64 << 10, kSeals);
  const auto memory = MappedMemory::Map(memfd.get(), 64 << 10, "arena");
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(AllocatedBytes(memfd), 0);
  EXPECT_TRUE((*memory)->PopulateAndSeal(memfd.get()).ok());
  EXPECT_EQ(AllocatedBytes(memfd), 64 << 10);
  EXPECT_EQ(fcntl(memfd.get(), F_GET_SEALS), kSeals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
  (*memory)->data()[0] = std::byte{1};
}

TEST(MappedMemoryTest, ZeroBytesMapNothing) {
  const FileDescriptor memfd = Memfd(0, kSeals);
  const auto memory = MappedMemory::Map(memfd.get(), 0, "arena");
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->data(), nullptr);
  EXPECT_TRUE((*memory)->PopulateAndSeal(memfd.get()).ok());
}

TEST(MappedMemoryTest, RefusesTooSmallMemfd) {
  const FileDescriptor memfd = Memfd(4096, kSeals);
  EXPECT_EQ(MappedMemory::Map(memfd.get(), 4097, "arena").status().code(),
            absl::StatusCode::kInternal);
}

TEST(MappedMemoryTest, RefusesMemfdThatCanShrink) {
  const FileDescriptor memfd = Memfd(4096, F_SEAL_GROW);
  EXPECT_EQ(MappedMemory::Map(memfd.get(), 4096, "arena").status().code(),
            absl::StatusCode::kInternal);
}

TEST(MappedMemoryTest, RefusesOtherFiles) {
  const FileDescriptor null(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(MappedMemory::Map(null.get(), 0, "arena").status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace gradsync::client
