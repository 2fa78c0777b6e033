#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/base/unique_fd.h"
#include "tools/gradsyncctl/doctor/checks.h"
#include "tools/gradsyncctl/quantity.h"

namespace gradsync {
namespace {

// MADV_POPULATE_WRITE, by which a trainer touches its arena first.
constexpr int kLeastMajor = 5;
constexpr int kLeastMinor = 14;
// Below this much, the gradients of even a small model are worth a thought.
constexpr std::uint64_t kLittleMemory = std::uint64_t{1} << 30;

void CheckKernel(Findings* findings) {
  utsname name{};
  int major = 0;
  int minor = 0;
  if (uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) {
    return AddWarning("kernel", "its version is unknown", "gradsync needs Linux 5.14 or newer",
                      findings);
  }
  const std::string what = absl::StrCat("Linux ", name.release);
  if (major < kLeastMajor || (major == kLeastMajor && minor < kLeastMinor)) {
    return AddFailure("kernel", absl::StrCat(what, " is too old"),
                      "install Linux 5.14 or newer (Debian 12 has 6.1)", findings);
  }
  AddOk("kernel", what, findings);
}

void CheckMemfd(Findings* findings) {
  const daemon::UniqueFd memory(memfd_create("gradsync-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid() || ftruncate(memory.get(), 1) != 0) {
    return AddFailure("shared memory", absl::StrCat("memfd_create: ", strerror(errno)),
                      "allow memfd_create in the sandbox (seccomp) of daemon and trainers",
                      findings);
  }
  AddOk("shared memory", "memfds work; no --ipc=host and no /dev/shm is needed for gradients",
        findings);
}

std::optional<std::uint64_t> NumberIn(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t number = 0;
  if (!(file >> word) || !absl::SimpleAtoi(word, &number)) return std::nullopt;  // "max"
  return number;
}

// The tightest limit of cgroup v2 from this process up to the root.
void CheckCgroup(const DoctorSubject& subject, Findings* findings) {
  std::ifstream cgroups(subject.root + "/proc/self/cgroup");
  std::string path;
  for (std::string line; std::getline(cgroups, line);) {
    if (absl::StartsWith(line, "0::/")) path = line.substr(3);
  }
  std::optional<std::uint64_t> least_left;
  std::uint64_t limit = 0;
  for (;;) {
    const std::string folder = absl::StrCat(subject.root, "/sys/fs/cgroup", path, "/");
    const auto max = NumberIn(folder + "memory.max");
    const auto current = NumberIn(folder + "memory.current");
    if (max.has_value() && current.has_value()) {
      const std::uint64_t left = *max - std::min(*max, *current);
      if (!least_left.has_value() || left < *least_left) {
        least_left = left;
        limit = *max;
      }
    }
    const std::size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  if (!least_left.has_value()) return AddOk("memory limit", "none by a cgroup", findings);
  const std::string what =
      absl::StrCat(FormatBytes(*least_left), " left of ", FormatBytes(limit), " by the cgroup");
  if (*least_left >= kLittleMemory) return AddOk("memory limit", what, findings);
  AddWarning("memory limit", what,
             "each rank's gradients count against this limit: raise memory.max (MemoryMax=, "
             "limits.memory) by their size",
             findings);
}

}  // namespace

void CheckMemory(const DoctorSubject& subject, Findings* findings) {
  CheckKernel(findings);
  CheckMemfd(findings);
  CheckCgroup(subject, findings);
}

}  // namespace gradsync
