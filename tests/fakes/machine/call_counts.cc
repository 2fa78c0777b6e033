#include "tests/fakes/machine/call_counts.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "daemon/base/unique_fd.h"
#include "tests/fakes/machine/shared_file.h"

namespace gradsync::fakes {
namespace {

constexpr char kPrefix[] = "calls.";
constexpr std::size_t kTableBytes = kMaxCountedFunctions * sizeof(CallCount);

std::uint64_t CallsIn(const std::string& path, const std::string& function) {
  const daemon::UniqueFd fd = OpenShared(path, O_RDONLY);
  if (!fd.valid()) return 0;
  void* const table = mmap(nullptr, kTableBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (table == MAP_FAILED) return 0;
  std::uint64_t calls = 0;
  const auto* const counts = static_cast<const CallCount*>(table);
  for (std::size_t i = 0; i < kMaxCountedFunctions; ++i) {
    if (function == counts[i].function) calls += counts[i].calls.load();
  }
  munmap(table, kTableBytes);
  return calls;
}

// nullptr if that fails.
void* MapTable(const std::string& path) {
  const daemon::UniqueFd fd = OpenShared(path, O_RDWR | O_CREAT);
  if (!fd.valid() || ftruncate(fd.get(), kTableBytes) != 0) return nullptr;
  void* const table = mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  return table == MAP_FAILED ? nullptr : table;
}

}  // namespace

// Each fake is a library with its own mapping of the table. All share the file, so a new entry is
// taken under the lock of the file.
std::atomic<std::uint64_t>& CallCounter(const StateFolder& folder, const char* function) {
  static std::atomic<std::uint64_t> uncounted;
  const std::string path = folder.PathOf(kPrefix + std::to_string(getpid()));
  static void* const table = MapTable(path);
  // Locks another descriptor than the mapped one, since a mapping would keep the lock.
  const daemon::UniqueFd fd = OpenShared(path, O_RDWR);
  if (table == nullptr || !fd.valid() || flock(fd.get(), LOCK_EX) != 0) return uncounted;
  auto* const counts = static_cast<CallCount*>(table);
  for (std::size_t i = 0; i < kMaxCountedFunctions; ++i) {
    if (counts[i].function[0] == '\0') {
      std::strncpy(counts[i].function, function, sizeof(counts[i].function) - 1);
    }
    if (std::strcmp(counts[i].function, function) == 0) return counts[i].calls;
  }
  return uncounted;
}

std::uint64_t CallsOf(const StateFolder& folder, const std::string& function, int pid) {
  if (pid != 0) return CallsIn(folder.PathOf(kPrefix + std::to_string(pid)), function);
  std::uint64_t calls = 0;
  DIR* const listing = opendir(folder.PathOf("").c_str());
  if (listing == nullptr) return 0;
  while (const dirent* entry = readdir(listing)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof(kPrefix) - 1) == 0) {
      calls += CallsIn(folder.PathOf(entry->d_name), function);
    }
  }
  closedir(listing);
  return calls;
}

}  // namespace gradsync::fakes
