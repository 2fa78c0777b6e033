#include "tools/bench/shared_region.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gradsync::bench {

absl::StatusOr<SharedRegion> SharedRegion::Map(int fd, std::size_t bytes, int flags) {
  SharedRegion region;
  region.fd_ = fd;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mapping ", bytes, " bytes"));
  }
  region.data_ = static_cast<std::byte*>(data);
  region.bytes_ = bytes;
  if (madvise(data, bytes, MADV_POPULATE_WRITE) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("populating ", bytes, " bytes"));
  }
  return region;
}

absl::StatusOr<SharedRegion> SharedRegion::Open(const std::string& path, std::size_t bytes) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(fd);
    return absl::ErrnoToStatus(error, absl::StrCat("shared memory of ", bytes, " bytes"));
  }
  return Map(fd, bytes, MAP_SHARED);
}

absl::StatusOr<SharedRegion> SharedRegion::Private(std::size_t bytes) {
  return Map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS);
}

SharedRegion::~SharedRegion() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace gradsync::bench
