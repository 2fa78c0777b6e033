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
// Each pod has a quota of its own, so a path counts as a pod only if no trainer can make it. Such a
// path begins with the kubelet's own cgroup, "kubepods" or "kubepods.slice". The next part names
// the pod. For the classes "burstable" and "besteffort" a part for the class comes before it. If
// the kubelet and containerd use different cgroup drivers, the pod is in the root cgroup or in
// containerd's service instead. To make a cgroup beside or inside the kubelet's, a process needs
// rights on the node's root cgroup. Inside containerd's service it needs rights on the cgroup of
// that service. Elsewhere, users can make cgroups with any name: systemd gives each user a part of
// the tree, and a container's runtime gives one to the container. Such a path is no pod, whatever
// its names are. A pod may own the tree below itself, so names behind the pod's do not count.
//
// If the daemon has a cgroup namespace of its own, paths outside of it begin with "/..". The next
// name is then a child of a cgroup that contains the daemon's, such as another pod beside the
// daemon's. Only the manager of the daemon's own cgroup can make such a child.
//
// With cgroups v1 there are several lines. If they name several pods, the place is unknown. A
// kubelet with another --cgroup-root has its pods elsewhere: the daemon does not see them as pods.
PodPlace PodPlaceIn(absl::string_view cgroups);

// Reads a process's /proc/PID/cgroup. NOT_FOUND or PERMISSION_DENIED: /proc hides it, or there is
// no such process.
using CgroupReader = std::function<absl::StatusOr<std::string>(pid_t pid)>;
absl::StatusOr<std::string> ReadCgroups(pid_t pid);

// Where the process runs that `pidfd` refers to. `pid` is its number; 0 in another PID namespace.
// If the pidfd still shows a living process afterwards, the number was not reused meanwhile;
// otherwise the place is unknown. If /proc hides a living process (hidepid, ProtectProc=), the
// daemon can see no pods at all, and the answer is kNode.
PodPlace PodPlaceOf(pid_t pid, int pidfd, const CgroupReader& read = ReadCgroups);

}  // namespace gradsync::daemon

#endif  // DAEMON_SESSION_POD_PLACE_H_
