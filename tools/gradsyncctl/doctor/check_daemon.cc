#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/base/unique_fd.h"
#include "daemon/base/version.h"
#include "tools/gradsyncctl/doctor/checks.h"

namespace gradsync {
namespace {

constexpr char kShowGpusToDaemon[] =
    "show gradsyncd the GPUs: under systemd install deploy/systemd/gpu.conf (PrivateDevices=yes "
    "hides them); in a container set NVIDIA_VISIBLE_DEVICES to the trainers' GPUs";

// Empty if somebody listens there, else why not.
std::string WhyUnreachable(const std::string& address, absl::Duration timeout) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return "the address has no port";
  std::string host = address.substr(0, colon);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.size() - 2);
  // Every address: this node's own is one of them.
  if (host == "0.0.0.0") host = "127.0.0.1";
  if (host == "::") host = "::1";
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) return gai_strerror(error);
  const auto free = absl::MakeCleanup([found] { freeaddrinfo(found); });
  const daemon::UniqueFd fd(
      socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return strerror(errno);
  if (connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0) return "";
  if (errno != EINPROGRESS) return strerror(errno);
  pollfd writable{fd.get(), POLLOUT, 0};
  if (poll(&writable, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) {
    return "no answer in time";
  }
  int result = 0;
  socklen_t size = sizeof(result);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &result, &size);
  return result == 0 ? "" : strerror(result);
}

void CheckPeerPort(const v1::GetStatusResponse& status, absl::Duration timeout,
                   Findings* findings) {
  if (status.peer_address().empty()) {
    return AddOk("peer port", "off: no jobs that span nodes", findings);
  }
  const std::string why = WhyUnreachable(status.peer_address(), timeout);
  if (why.empty()) return AddOk("peer port", status.peer_address() + " answers", findings);
  AddFailure(
      "peer port", absl::StrCat(status.peer_address(), ": ", why),
      "check that peer_listen is an address of this node and that the firewall lets it through",
      findings);
}

void CheckDaemonsGpus(const v1::CudaStatus& cuda, std::size_t gpus, Findings* findings) {
  const auto seen = static_cast<std::size_t>(cuda.gpus_size());
  if (cuda.driver_version().empty()) {
    if (gpus == 0) return AddOk("daemon's GPUs", "none", findings);
    return AddFailure("daemon's GPUs", cuda.driver_error(), kShowGpusToDaemon, findings);
  }
  if (seen < gpus) {
    return AddFailure("daemon's GPUs", absl::StrCat("it sees ", seen, " of the ", gpus, " here"),
                      kShowGpusToDaemon, findings);
  }
  if (seen > 1 && cuda.nccl_version().empty()) {
    return AddWarning(
        "daemon's GPUs",
        absl::StrCat("no NCCL, so that a job's ranks here must share one GPU: ", cuda.nccl_error()),
        "install NCCL 2.19 or newer where the daemon's loader finds it, or set gradsyncd's option "
        "nccl_library",
        findings);
  }
  AddOk("daemon's GPUs",
        absl::StrCat(seen, ", driver for CUDA ", cuda.driver_version(),
                     cuda.nccl_version().empty() ? "" : ", NCCL " + cuda.nccl_version()),
        findings);
  for (const v1::WorkerStatus& worker : cuda.workers()) {
    if (worker.state() != v1::WORKER_STATE_FAILED) continue;
    AddWarning(
        "workers", absl::StrCat("job ", worker.job_id(), ": ", worker.last_failure()),
        "start the job's trainers again; if it fails again, see the daemon's log and nvidia-smi",
        findings);
  }
}

}  // namespace

void CheckDaemon(const DoctorSubject& subject, std::size_t gpus, const DaemonProcessOwner& owner,
                 Findings* findings) {
  if (!subject.daemon.ok()) {
    // The checks of the sockets have said already why no daemon answers.
    if (!owner.known) return;
    return AddFailure("daemon", std::string(subject.daemon.status().message()),
                      "see its log (journalctl -u gradsyncd)", findings);
  }
  const v1::GetStatusResponse& status = *subject.daemon;
  const std::string version = absl::StrCat("gradsyncd ", status.version());
  if (status.state() == v1::DAEMON_STATE_DRAINING) {
    AddWarning("daemon", version + " drains: it accepts no new trainers", "wait until it is back",
               findings);
  } else if (status.version() != daemon::kVersion) {
    AddWarning("daemon", absl::StrCat(version, " differs from gradsyncctl ", daemon::kVersion),
               "install both from one release", findings);
  } else {
    AddOk("daemon", version + " serves", findings);
  }
  for (const std::string& warning : status.warnings()) {
    AddWarning("daemon", warning, "see deploy/README.md", findings);
  }
  CheckDaemonsGpus(status.cuda(), gpus, findings);
  CheckPeerPort(status, subject.timeout, findings);
}

}  // namespace gradsync
