#include "tests/fakes/machine/device_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "tests/fakes/machine/shared_file.h"

namespace gradsync::fakes {
namespace {

constexpr std::uint64_t kMagic = 0x67726164'73796e63;
constexpr char kLockName[] = "lock";

std::string GpuPath(const StateFolder& folder, std::uint32_t gpu) {
  return folder.PathOf("gpu" + std::to_string(gpu));
}

void Lock(int fd, int operation) {
  while (flock(fd, operation) != 0 && errno == EINTR) {
  }
}

// A lock that is held while files of a GPU are made, counted or removed.
class GpuLock {
 public:
  explicit GpuLock(const std::string& path)
      : fd_(OpenShared(path + "/" + kLockName, O_RDWR | O_CREAT)) {
    Lock(fd_.get(), LOCK_EX);
  }

 private:
  const daemon::UniqueFd fd_;
};

std::optional<AllocationHeader> ReadHeader(int fd) {
  AllocationHeader header{};
  if (pread(fd, &header, sizeof(header), 0) != sizeof(header) || header.magic != kMagic) {
    return std::nullopt;
  }
  return header;
}

std::vector<AllocationHeader> LiveLocked(const std::string& path) {
  std::vector<AllocationHeader> live;
  DIR* const listing = opendir(path.c_str());
  if (listing == nullptr) return live;
  while (const dirent* entry = readdir(listing)) {
    const std::string name = entry->d_name;
    if (name[0] == '.' || name == kLockName) continue;
    std::string file = path;
    file.append("/").append(name);
    const daemon::UniqueFd fd = OpenShared(file, O_RDONLY);
    if (!fd.valid()) continue;
    if (flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      unlink(file.c_str());
    } else if (const std::optional<AllocationHeader> header = ReadHeader(fd.get())) {
      live.push_back(*header);
    }
  }
  closedir(listing);
  return live;
}

std::size_t Sum(const std::vector<AllocationHeader>& allocations) {
  std::size_t sum = 0;
  for (const AllocationHeader& allocation : allocations) sum += allocation.bytes;
  return sum;
}

}  // namespace

std::shared_ptr<Allocation> Allocation::Create(const StateFolder& folder, std::uint32_t gpu,
                                               MemoryKind kind, std::size_t bytes) {
  const std::string path = GpuPath(folder, gpu);
  const std::size_t total = folder.machine().gpus[gpu].memory_bytes;
  const GpuLock lock(path);
  const std::size_t used = Sum(LiveLocked(path));
  if (bytes > total || used > total - bytes) return nullptr;
  AllocationHeader header{kMagic, 1, bytes, gpu, kind, getpid(), getuid()};
  daemon::UniqueFd fd;
  do {
    fd = OpenShared(path + "/" + std::to_string(header.id), O_RDWR | O_CREAT | O_EXCL);
    if (fd.valid()) break;
    ++header.id;
  } while (errno == EEXIST);
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(kHeaderBytes + bytes)) != 0 ||
      pwrite(fd.get(), &header, sizeof(header), 0) != sizeof(header)) {
    return nullptr;
  }
  Lock(fd.get(), LOCK_SH);
  return std::shared_ptr<Allocation>(new Allocation(std::move(fd), header));
}

std::shared_ptr<Allocation> Allocation::Adopt(const StateFolder& folder, daemon::UniqueFd fd) {
  const std::optional<AllocationHeader> header = ReadHeader(fd.get());
  struct stat given, named;
  if (!header.has_value() || header->gpu >= folder.machine().gpus.size() ||
      fstat(fd.get(), &given) != 0 ||
      stat((GpuPath(folder, header->gpu) + "/" + std::to_string(header->id)).c_str(), &named) !=
          0 ||
      given.st_ino != named.st_ino || given.st_dev != named.st_dev) {
    return nullptr;
  }
  return std::shared_ptr<Allocation>(new Allocation(std::move(fd), *header));
}

std::shared_ptr<Allocation> Allocation::Find(const StateFolder& folder, std::uint32_t gpu,
                                             std::uint64_t id) {
  if (gpu >= folder.machine().gpus.size()) return nullptr;
  const std::string path = GpuPath(folder, gpu);
  const GpuLock lock(path);
  LiveLocked(path);  // removes the file if no process has the allocation
  daemon::UniqueFd fd = OpenShared(path + "/" + std::to_string(id), O_RDWR);
  if (!fd.valid()) return nullptr;
  Lock(fd.get(), LOCK_SH);
  return Adopt(folder, std::move(fd));
}

std::vector<AllocationHeader> LiveAllocations(const StateFolder& folder, std::uint32_t gpu) {
  const std::string path = GpuPath(folder, gpu);
  const GpuLock lock(path);
  return LiveLocked(path);
}

std::size_t UsedBytes(const StateFolder& folder, std::uint32_t gpu) {
  return Sum(LiveAllocations(folder, gpu));
}

}  // namespace gradsync::fakes
