#include "client/src/mapped_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/src/error.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace gradsync::client {

absl::StatusOr<std::shared_ptr<MappedMemory>> MappedMemory::Map(int memfd, std::size_t bytes,
                                                                absl::string_view what) {
  struct stat status;
  const int seals = fcntl(memfd, F_GET_SEALS);
  if (fstat(memfd, &status) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<std::uint64_t>(status.st_size) < bytes) {
    return MakeError(
        absl::StatusCode::kInternal, reason::kProtocolViolation,
        absl::StrCat("the daemon's ", what, " is not a sealed memfd of ", bytes,
                     " bytes; check that gradsyncd and the client are of one release"));
  }
  if (bytes == 0) return absl::WrapUnique(new MappedMemory(nullptr, 0, 0));
  const auto whole = static_cast<std::size_t>(status.st_size);
  void* data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  if (data == MAP_FAILED) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                     absl::StrCat("no address space for ", bytes, " bytes of the ", what,
                                  "; raise the limit (ulimit -v)"));
  }
  return absl::WrapUnique(new MappedMemory(static_cast<std::byte*>(data), bytes, whole));
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

absl::Status MappedMemory::PopulateAndSeal(int memfd) const {
  if (mapped_ == 0) return absl::OkStatus();
  int failed;
  do {
    failed = madvise(data_, mapped_, MADV_POPULATE_WRITE);
  } while (failed != 0 && (errno == EINTR || errno == EAGAIN));
  if (failed != 0 && errno != EINVAL) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kMemory,
        absl::StrCat("no memory for ", mapped_,
                     " bytes shared with gradsyncd; raise the trainer's memory limit"));
  }
  // For an older kernel: a write to each page has the same effect.
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t i = 0; failed != 0 && i < mapped_; i += page) {
    volatile std::byte* const touched = data_ + i;
    *touched = *touched;
  }
  if (fcntl(memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0) return absl::OkStatus();
  return absl::UnimplementedError(
      "the kernel cannot seal the pages of shared memory (F_SEAL_FUTURE_WRITE); gradsync needs "
      "Linux 5.1 or later");
}

}  // namespace gradsync::client
