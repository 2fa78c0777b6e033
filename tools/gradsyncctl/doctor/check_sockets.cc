#include <grp.h>
#include <pwd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "daemon/base/passed_descriptors.h"
#include "daemon/base/unique_fd.h"
#include "tools/gradsyncctl/doctor/checks.h"

namespace gradsync {
namespace {

// What some ten sessions take: six for each session, and more for each layout.
constexpr std::uint64_t kFewDescriptors = 256;
constexpr std::uint64_t kFewDescriptorsOfDaemon = 1024;

std::string UserName(uid_t uid) {
  const passwd* const user = getpwuid(uid);
  return user != nullptr ? user->pw_name : absl::StrCat(uid);
}

std::string GroupName(gid_t gid) {
  const group* const found = getgrgid(gid);
  return found != nullptr ? found->gr_name : absl::StrCat(gid);
}

// "0660 gradsync:gradsync".
std::string Rights(const struct stat& file) {
  return absl::StrFormat("%04o %s:%s", file.st_mode & 07777, UserName(file.st_uid),
                         GroupName(file.st_gid));
}

std::string Folder(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

void AddRefusal(const char* check, const std::string& path, Findings* findings) {
  struct stat file {};
  const bool seen = stat(path.c_str(), &file) == 0;
  const std::string folder = Folder(path);
  struct stat around {};
  const bool folder_seen = stat(folder.c_str(), &around) == 0;
  AddFailure(
      check,
      absl::StrCat("user ", UserName(geteuid()), " may not connect to ", path,
                   seen ? absl::StrCat(" (", Rights(file), ")") : "",
                   folder_seen ? absl::StrCat(" in ", folder, " (", Rights(around), ")") : ""),
      absl::StrCat("join the group: usermod --append --groups ",
                   seen          ? GroupName(file.st_gid)
                   : folder_seen ? GroupName(around.st_gid)
                                 : "gradsync",
                   " ", UserName(geteuid()),
                   ", then log in again; in Kubernetes: supplementalGroups"),
      findings);
}

void AddConnectError(const char* check, const std::string& path, int error, Findings* findings) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return AddFailure(
          check, absl::StrCat("there is no ", path),
          "start gradsyncd, or name its socket: --socket PATH or GRADSYNC_SOCKET; in a "
          "container mount its folder, not the socket",
          findings);
    case ECONNREFUSED:
      return AddFailure(check, absl::StrCat("nobody listens at ", path),
                        "the daemon has ended: see its log (journalctl -u gradsyncd) and start it",
                        findings);
    case EACCES:
    case EPERM:
      return AddRefusal(check, path, findings);
    case EPROTOTYPE:
      return AddFailure(
          check, absl::StrCat(path, " is a socket of another kind"),
          "check whether it is another program's; gradsyncd has X.sock, and X-fd.sock beside it",
          findings);
    case EAGAIN:
      return AddFailure(check, absl::StrCat(path, " accepts no connection"),
                        "the daemon is stopped or overloaded: see its log", findings);
    default:
      return AddFailure(check, absl::StrCat(path, ": ", strerror(error)),
                        "check the path that --socket or GRADSYNC_SOCKET names", findings);
  }
}

daemon::UniqueFd CheckSocket(const char* check, const std::string& path, int type,
                             const DoctorSubject& subject, Findings* findings) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    AddConnectError(check, path, ENAMETOOLONG, findings);
    return daemon::UniqueFd();
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  daemon::UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  const timeval limit = absl::ToTimeval(subject.timeout);
  if (!fd.valid() || setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0 ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    AddConnectError(check, path, errno, findings);
    return daemon::UniqueFd();
  }
  struct stat file {};
  struct stat around {};
  const bool seen = stat(path.c_str(), &file) == 0 && stat(Folder(path).c_str(), &around) == 0;
  const std::string what = seen ? absl::StrCat(path, " (", Rights(file), ")") : path;
  if (seen && (file.st_mode & S_IWOTH) != 0 && (around.st_mode & S_IXOTH) != 0) {
    AddWarning(check, absl::StrCat(what, " is open to every user of this node"),
               "set socket_mode to 0660 and add the users who train to its group", findings);
  } else {
    AddOk(check, what, findings);
  }
  return fd;
}

// The soft limit of a line of /proc/PID/limits; 0: unknown.
std::uint64_t OpenFilesOf(const std::string& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string max;
    std::string open;
    std::string files;
    std::string soft;
    if (!(words >> max >> open >> files >> soft) || max != "Max" || open != "open") continue;
    std::uint64_t limit = 0;
    return soft == "unlimited" ? UINT64_MAX : absl::SimpleAtoi(soft, &limit) ? limit : 0;
  }
  return 0;
}

}  // namespace

DaemonProcessOwner CheckSockets(const DoctorSubject& subject, Findings* findings) {
  DaemonProcessOwner owner;
  const daemon::UniqueFd grpc =
      CheckSocket("socket", subject.socket, SOCK_STREAM, subject, findings);
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (grpc.valid() && getsockopt(grpc.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0) {
    owner = {true, credentials.uid, credentials.pid};
    const std::string who =
        absl::StrCat("user ", UserName(owner.uid), owner.uid == geteuid() ? ", as you are" : "",
                     owner.pid == 0 ? "" : absl::StrCat(", pid ", owner.pid));
    // Asks the kernel: what this end refuses does not matter.
    const bool safe = owner.uid == geteuid() || daemon::RefuseDescriptors(grpc.get());
    AddOk("daemon's user",
          absl::StrCat(who, safe ? "" : "; before Linux 6.16 it must let in trusted users alone"),
          findings);
  }
  CheckSocket("fd socket", absl::StrCat(absl::StripSuffix(subject.socket, ".sock"), "-fd.sock"),
              SOCK_SEQPACKET, subject, findings);
  return owner;
}

void CheckNamespaces(const DoctorSubject& subject, const DaemonProcessOwner& owner,
                     Findings* findings) {
  if (owner.known && owner.pid == 0) {
    AddWarning("PID namespace",
               "the daemon is in another one: it notices a lost trainer by its connection only, "
               "and legacy CUDA IPC fails",
               "share it: shareProcessNamespace: true in a pod, hostPID: true for a DaemonSet, "
               "--pid=host or --pid=container:NAME for a container",
               findings);
  } else {
    AddOk("PID namespace",
          owner.known ? "the daemon's is visible from here" : "not compared: no daemon", findings);
  }
  std::ifstream map(subject.root + "/proc/self/uid_map");
  std::uint64_t inside = 0;
  std::uint64_t outside = 0;
  std::uint64_t count = 0;
  if (map >> inside >> outside >> count && (inside != 0 || outside != 0 || count < UINT32_MAX)) {
    AddWarning(
        "user namespace",
        absl::StrCat("this process is in one: to the daemon its user may differ from ",
                     UserName(geteuid())),
        "run trainers outside of it or map their user (--userns=keep-id); the daemon refuses "
        "user 65534",
        findings);
  } else {
    AddOk("user namespace", "the node's own", findings);
  }
}

void CheckDescriptors(const DoctorSubject& subject, const DaemonProcessOwner& owner,
                      Findings* findings) {
  rlimit own{};
  if (getrlimit(RLIMIT_NOFILE, &own) == 0) {
    const std::string what = absl::StrCat("up to ", own.rlim_cur, " in this shell");
    if (own.rlim_cur < kFewDescriptors) {
      AddWarning("descriptors", what, "raise it for trainers: ulimit -n 4096", findings);
    } else {
      AddOk("descriptors", what, findings);
    }
  }
  if (owner.pid == 0) return;
  const std::uint64_t limit =
      OpenFilesOf(absl::StrCat(subject.root, "/proc/", owner.pid, "/limits"));
  if (limit == 0 || limit >= kFewDescriptorsOfDaemon) return;
  AddWarning(
      "descriptors",
      absl::StrCat("the daemon may open ", limit, " files; it needs at least six for each rank"),
      "raise LimitNOFILE= in its unit, or ulimit -n where it is started", findings);
}

}  // namespace gradsync
