// How many CPUs this process may use.

#ifndef DAEMON_REDUCE_AVAILABLE_CPUS_H_
#define DAEMON_REDUCE_AVAILABLE_CPUS_H_

#include <string>

namespace gradsync::daemon {

// The smaller of the scheduler's affinity and the cgroup's CPU quota rounded up; at least 1. Reads
// files, so call it only at start-up.
int AvailableCpus();

// The smallest CPU quota of this process's cgroup and its ancestors, rounded up to whole CPUs; 0 if
// there is none. `membership` is the text of /proc/self/cgroup, `mount` where cgroups are mounted
// (/sys/fs/cgroup): version 2, or version 1 with its cpu hierarchy in cpu/ or cpu,cpuacct/.
int CgroupCpuQuota(const std::string& membership, const std::string& mount);

}  // namespace gradsync::daemon

#endif  // DAEMON_REDUCE_AVAILABLE_CPUS_H_
