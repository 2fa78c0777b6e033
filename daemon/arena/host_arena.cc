#include "daemon/arena/host_arena.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace gradsync::daemon {
namespace {

constexpr std::size_t kBlockBytes = 512;  // unit of st_blocks, whatever the file system

}  // namespace

absl::StatusOr<std::shared_ptr<HostArena>> HostArena::Create(const std::string& name,
                                                             std::size_t bytes) {
  absl::StatusOr<SealedMemory> memory = SealedMemory::Create(name, bytes);
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<HostArena>(new HostArena(*std::move(memory)));
}

HostArena::HostArena(SealedMemory memory) : memory_(std::move(memory)) {}

HostArena::~HostArena() {
  if (data_ != nullptr) munmap(data_, bytes());
}

absl::Status HostArena::CheckPopulated() const {
  struct stat file;
  if (fstat(fd(), &file) != 0) return absl::ErrnoToStatus(errno, "fstat of an arena");
  const std::size_t populated = static_cast<std::size_t>(file.st_blocks) * kBlockBytes;
  if (populated >= bytes()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the memory is not populated: ", populated,
                                                    " of ", bytes(), " bytes are allocated"));
}

absl::Status HostArena::Map(Faults faults) {
  if (data_ != nullptr) return absl::FailedPreconditionError("the arena is already mapped");
  void* const address = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
  if (address == MAP_FAILED && errno == EPERM) {
    return absl::FailedPreconditionError("the trainer has sealed the memory itself");
  }
  if (address == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mmap of an arena of ", bytes(), " bytes"));
  }
  // The check comes after the seal: no page can be freed between the two.
  absl::Status status = memory_.SealPages();
  if (status.ok()) status = CheckPopulated();
  // EINVAL means a kernel before 5.14. The arena works without this call, but the first step is
  // slower.
  if (status.ok() && faults == Faults::kNow &&
      madvise(address, bytes(), MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    status = absl::ErrnoToStatus(
        errno, absl::StrCat("populating the mapping of an arena of ", bytes(), " bytes"));
  }
  if (!status.ok()) {
    munmap(address, bytes());
    return status;
  }
  data_ = static_cast<std::byte*>(address);
  return absl::OkStatus();
}

}  // namespace gradsync::daemon
