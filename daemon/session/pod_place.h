// Says in which pod of Kubernetes a process runs, from its cgroups.

#ifndef DAEMON_SESSION_POD_PLACE_H_
#define DAEMON_SESSION_POD_PLACE_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/base/tenant.h"

namespace gradsync::daemon {

// A value.
struct PodPlace {
  enum class Kind : std::uint8_t {
    kUnknown,  // the daemon cannot tell
    kNode,     // in no pod
    kPod,
  };
  Kind kind = Kind::kUnknown;
  PodId pod;  // kPod; otherwise none

  bool operator==(const PodPlace& other) const { return kind == other.kind && pod == other.pod; }
};

// Reads the text of /proc/PID/cgroup, as the daemon sees it.
//
// Whatever is a pod here has a quota of its own. So only what no trainer can make counts as one: a
// path that begins with the kubelet's own cgroup, "kubepods" or "kubepods.slice", with the pod at
// its place in there. Making a cgroup beside or inside that one takes rights on the node's root
// cgroup. Elsewhere users make cgroups with any name: systemd gives each user a part of the tree,
// and a container's runtime gives one to the container. Such a path is no pod, whatever it says. A
// pod may own the tree below itself, so names behind the pod's do not count.
//
// If the daemon has a cgroup namespace of its own, paths outside of it begin with "/..": then what
// follows is a child of a cgroup that the daemon is in, such as another pod beside the daemon's.
// Only the manager of the daemon's own cgroup can make one.
//
// With cgroups v1 there are several lines; if they name several pods, the place is unknown. A
// kubelet with another --cgroup-root has its pods elsewhere: they are no pods to the daemon.
PodPlace PodPlaceIn(absl::string_view cgroups);

// Reads a process's /proc/PID/cgroup. NOT_FOUND or PERMISSION_DENIED: /proc hides it, or there is
// no such process.
using CgroupReader = std::function<absl::StatusOr<std::string>(pid_t pid)>;
absl::StatusOr<std::string> ReadCgroups(pid_t pid);

// Where the process runs that `pidfd` refers to. `pid` is its number; 0 in another PID namespace.
// The pidfd must still show a living process afterwards: so the number was not reused meanwhile.
// If /proc hides the process although it lives (hidepid, ProtectProc=), the daemon knows no pods at
// all, and the answer is kNode.
PodPlace PodPlaceOf(pid_t pid, int pidfd, const CgroupReader& read = ReadCgroups);

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_POD_PLACE_H_
