#include "daemon/session/pod_place.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "daemon/base/unique_fd.h"

namespace gradsync::daemon {
namespace {

// The kernel shows at most a page of each path, and there are 14 hierarchies at most.
constexpr std::size_t kMaxBytes = 64 << 10;

using Names = std::vector<absl::string_view>;

// The kubelet's class of pods, which "guaranteed" ones lack.
bool IsClass(absl::string_view name) {
  return name == "burstable" || name == "besteffort" || name == "kubepods-burstable.slice" ||
         name == "kubepods-besteffort.slice";
}

// A pod's cgroup, by the driver "systemd": "kubepods-burstable-podID.slice". A containerd with the
// other driver than its kubelet adds ":cri-containerd:CONTAINER", and has no kubepods.slice.
std::optional<PodId> PodOfSlice(absl::string_view name) {
  name = name.substr(0, name.find(':'));
  if (!absl::ConsumePrefix(&name, "kubepods-")) return std::nullopt;
  if (!absl::ConsumePrefix(&name, "burstable-")) absl::ConsumePrefix(&name, "besteffort-");
  if (!absl::ConsumePrefix(&name, "pod") || !absl::ConsumeSuffix(&name, ".slice")) {
    return std::nullopt;
  }
  return PodId::Parse(name);
}

// By the driver "cgroupfs": "podID".
std::optional<PodId> PodOfFolder(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "pod")) return std::nullopt;
  return PodId::Parse(name);
}

// The place that one path names.
PodPlace PlaceOf(absl::string_view path) {
  const PodPlace unknown;
  const PodPlace node{PodPlace::Kind::kNode, {}};
  if (!absl::ConsumePrefix(&path, "/")) return unknown;
  const Names names = absl::StrSplit(path, '/');
  std::size_t i = 0;
  const auto name = [&] { return i < names.size() ? names[i] : absl::string_view(); };
  while (name() == "..") ++i;
  // Beside the daemon's own cgroup there need not be the kubelet's first one: the daemon may be in
  // it, too.
  bool in_kubepods = i > 0;
  bool must_be_pod = false;
  if (name() == "kubepods" || name() == "kubepods.slice") {
    in_kubepods = must_be_pod = true;
    ++i;
  } else if (name() == "system.slice" && i + 1 < names.size() &&
             names[i + 1] == "containerd.service") {
    i += 2;
  }
  if (in_kubepods && IsClass(name())) {
    must_be_pod = true;
    ++i;
  }
  auto pod = PodOfSlice(name());
  if (!pod.has_value() && in_kubepods) pod = PodOfFolder(name());
  if (pod.has_value()) return {PodPlace::Kind::kPod, *pod};
  return must_be_pod ? unknown : node;
}

}  // namespace

PodPlace PodPlaceIn(absl::string_view cgroups) {
  PodPlace place;
  bool any_unknown = false;
  // "3:cpuset:/path" or "0::/path".
  for (const absl::string_view line : absl::StrSplit(cgroups, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    const PodPlace one = parts.size() == 3 ? PlaceOf(parts[2]) : PodPlace{};
    if (one.kind == PodPlace::Kind::kPod) {
      if (place.kind == PodPlace::Kind::kPod && place.pod != one.pod) return {};
      place = one;
    } else if (one.kind == PodPlace::Kind::kUnknown) {
      any_unknown = true;
    } else if (place.kind == PodPlace::Kind::kUnknown) {
      place = one;
    }
  }
  return any_unknown && place.kind == PodPlace::Kind::kNode ? PodPlace{} : place;
}

absl::StatusOr<std::string> ReadCgroups(pid_t pid) {
  const UniqueFd file(open(absl::StrCat("/proc/", pid, "/cgroup").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return absl::ErrnoToStatus(errno, "/proc/PID/cgroup");
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t size = read(file.get(), buffer, sizeof(buffer));
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return absl::ErrnoToStatus(errno, "/proc/PID/cgroup");
    if (size == 0) return text;
    text.append(buffer, static_cast<std::size_t>(size));
    if (text.size() > kMaxBytes) return absl::OutOfRangeError("/proc/PID/cgroup is too long");
  }
}

PodPlace PodPlaceOf(pid_t pid, int pidfd, const CgroupReader& read) {
  if (pid <= 0 || pidfd < 0) return {};
  const auto text = read(pid);
  pollfd ended{pidfd, POLLIN, 0};
  if (poll(&ended, 1, /*timeout=*/0) != 0) return {};
  if (text.ok()) return PodPlaceIn(*text);
  const bool hidden = absl::IsNotFound(text.status()) || absl::IsPermissionDenied(text.status());
  return hidden ? PodPlace{PodPlace::Kind::kNode, {}} : PodPlace{};
}

}  // namespace gradsync::daemon
