#include "daemon/reduce/available_cpus.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gradsync::daemon {
namespace {

// "" if there is no such file.
std::string Contents(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

// Whole CPUs of a quota and a period in microseconds as the files spell them; 0 for "max", -1 and
// "".
int WholeCpus(absl::string_view quota, absl::string_view period) {
  std::int64_t quota_us = 0;
  std::int64_t period_us = 0;
  if (!absl::SimpleAtoi(quota, &quota_us) || !absl::SimpleAtoi(period, &period_us)) return 0;
  if (quota_us <= 0 || period_us <= 0) return 0;
  return static_cast<int>(std::min<std::int64_t>((quota_us - 1) / period_us + 1, 1 << 20));
}

int QuotaOfDirectory(const std::string& directory, bool version_2) {
  if (!version_2) {
    return WholeCpus(Contents(directory + "/cpu.cfs_quota_us"),
                     Contents(directory + "/cpu.cfs_period_us"));
  }
  const std::string text = Contents(directory + "/cpu.max");  // "QUOTA PERIOD"
  const std::pair<absl::string_view, absl::string_view> fields =
      absl::StrSplit(absl::string_view(text), absl::MaxSplits(' ', 1));
  return WholeCpus(fields.first, fields.second);
}

// The smallest quota from `path` up to `root`. A path that this mount does not show (a container
// that sees the host's membership but its own mount) has no files, and the walk ends at the root,
// which then is the container's own.
int SmallestQuota(const std::string& root, std::string path, bool version_2) {
  int smallest = 0;
  for (;;) {
    const int quota = QuotaOfDirectory(root + path, version_2);
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
    if (path.empty()) return smallest;
    const std::size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
}

int AffinityCpus() {
  // The kernel refuses a set smaller than its own; 2^16 CPUs is more than it can be built for.
  for (int cpus = CPU_SETSIZE; cpus <= 1 << 16; cpus *= 2) {
    cpu_set_t* const set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const int result = sched_getaffinity(0, CPU_ALLOC_SIZE(cpus), set);
    const int error = errno;
    const int count = result == 0 ? CPU_COUNT_S(CPU_ALLOC_SIZE(cpus), set) : 0;
    CPU_FREE(set);
    if (result == 0) return count;
    if (error != EINVAL) break;
  }
  return 1;
}

}  // namespace

int CgroupCpuQuota(const std::string& membership, const std::string& mount) {
  int smallest = 0;
  const auto take = [&smallest](int quota) {
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
  };
  for (absl::string_view line : absl::StrSplit(membership, '\n', absl::SkipEmpty())) {
    // HIERARCHY:CONTROLLERS:PATH; version 2 is 0::PATH.
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::string path = fields[2] == "/" ? "" : std::string(fields[2]);
    if (fields[1].empty()) {
      take(SmallestQuota(mount, path, /*version_2=*/true));
      continue;
    }
    for (absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller != "cpu") continue;
      take(SmallestQuota(mount + "/cpu", path, /*version_2=*/false));
      take(SmallestQuota(mount + "/cpu,cpuacct", path, /*version_2=*/false));
    }
  }
  return smallest;
}

int AvailableCpus() {
  const int affinity = std::max(1, AffinityCpus());
  const int quota = CgroupCpuQuota(Contents("/proc/self/cgroup"), "/sys/fs/cgroup");
  return quota > 0 ? std::min(affinity, quota) : affinity;
}

}  // namespace gradsync::daemon
