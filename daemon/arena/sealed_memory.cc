#include "daemon/arena/sealed_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/error.h"

// Since Linux 6.3. Debian 12's headers lack it.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace gradsync::daemon {
namespace {

// memfd_create(2): the name is at most 249 bytes without its terminating null byte.
constexpr std::size_t kMaxNameBytes = 249;
constexpr std::size_t kBlockBytes = 512;  // unit of st_blocks, whatever the file system

absl::StatusOr<std::size_t> RoundUpToPages(std::size_t bytes) {
  const std::size_t page = bytes > SealedMemory::kHugePage
                               ? SealedMemory::kHugePage
                               : static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) - page) {
    return absl::InvalidArgumentError(absl::StrCat("memory of ", bytes, " bytes is too large"));
  }
  return std::max<std::size_t>(1, (bytes + page - 1) / page) * page;
}

// A memfd that can never be executed: with vm.memfd_noexec=2 Linux 6.3 to 6.5 makes no other.
// Kernels before 6.3 do not know the flag.
int NewMemfd(const std::string& name) {
  constexpr unsigned int kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = memfd_create(name.c_str(), kFlags | MFD_NOEXEC_SEAL);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create(name.c_str(), kFlags);
}

absl::Status NoMemory(int error, const std::string& name, std::size_t bytes, const char* call) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, reason::kMemory,
      absl::StrCat("gradsyncd gets no memory for ", name, " (", bytes, " bytes): ", call, ": ",
                   std::strerror(error),
                   "; allow memfd_create in its sandbox (seccomp), free memory, or raise its limit "
                   "of file sizes (LimitFSIZE, ulimit -f)"));
}

}  // namespace

absl::StatusOr<SealedMemory> SealedMemory::Create(const std::string& name, std::size_t bytes) {
  const absl::StatusOr<std::size_t> size = RoundUpToPages(bytes);
  if (!size.ok()) return size.status();
  const int fd = NewMemfd(name.substr(0, kMaxNameBytes));
  if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, reason::kOpenFiles,
        absl::StrCat("gradsyncd has as many open files as its limit allows, so there is "
                     "no descriptor for ",
                     name, "; raise LimitNOFILE of its unit (ulimit -n)"));
  }
  if (fd < 0) return NoMemory(errno, name, *size, "memfd_create");
  SealedMemory memory(fd, *size);
  if (ftruncate(fd, static_cast<off_t>(*size)) != 0) {
    return NoMemory(errno, name, *size, "ftruncate");
  }
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return NoMemory(errno, name, *size, "F_ADD_SEALS");
  }
  return memory;
}

bool SealedMemory::PagesAreSealed() const {
  constexpr int kWanted = F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  const int seals = fcntl(fd_, F_GET_SEALS);
  return seals >= 0 && (seals & kWanted) == kWanted;
}

absl::Status SealedMemory::CheckPopulatedAndSealed() const {
  // The daemon does not seal: F_ADD_SEALS waits for a lock that the trainer can hold.
  if (!PagesAreSealed()) {
    return absl::FailedPreconditionError("the pages of the memory are not sealed");
  }
  struct stat file;
  if (fstat(fd_, &file) != 0) return absl::ErrnoToStatus(errno, "fstat of shared memory");
  const std::size_t populated = static_cast<std::size_t>(file.st_blocks) * kBlockBytes;
  if (populated >= bytes_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the memory is not populated: ", populated,
                                                    " of ", bytes_, " bytes are allocated"));
}

absl::StatusOr<std::byte*> SealedMemory::Map(Populate populate) const {
  const int flags = MAP_SHARED | (populate == Populate::kYes ? MAP_POPULATE : 0);
  void* const address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd_, 0);
  if (address != MAP_FAILED) return static_cast<std::byte*>(address);
  if (errno != ENOMEM)
    return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes_, " bytes"));
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kMemory,
                   absl::StrCat("gradsyncd cannot map ", bytes_,
                                " bytes more: it has as many mappings as vm.max_map_count allows, "
                                "or no address space is left (ulimit -v); raise the limit"));
}

SealedMemory::SealedMemory(SealedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}

SealedMemory& SealedMemory::operator=(SealedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SealedMemory::~SealedMemory() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace gradsync::daemon
