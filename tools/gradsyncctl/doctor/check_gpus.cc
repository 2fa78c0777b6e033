#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/cuda/least_driver.h"
#include "tools/gradsyncctl/doctor/checks.h"

namespace gradsync {
namespace {

constexpr int kLeastNccl = 21900;

// The type of cuDriverGetVersion and ncclGetVersion. They touch no GPU.
using VersionFunction = int(int*);

// Never closed: a library of a driver does not like that.
struct Library {
  std::string error;  // empty: it is open
  int version = 0;    // 0: it does not say
  void* handle = nullptr;
};

Library Open(const std::string& path, const char* version_function) {
  Library library;
  library.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library.handle == nullptr) {
    const char* const why = dlerror();
    library.error = why != nullptr ? why : path;
    return library;
  }
  auto* const version = reinterpret_cast<VersionFunction*>(dlsym(library.handle, version_function));
  if (version == nullptr || version(&library.version) != 0) library.version = 0;
  return library;
}

bool IsGpuFile(const std::string& name) {
  constexpr absl::string_view kPrefix = "nvidia";
  return absl::StartsWith(name, kPrefix) && name.size() > kPrefix.size() &&
         std::all_of(name.begin() + kPrefix.size(), name.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

bool Exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

void CheckDriver(const DoctorSubject& subject, std::size_t gpus, Findings* findings) {
  const Library driver = Open(subject.cuda_library, "cuDriverGetVersion");
  if (!driver.error.empty()) {
    if (gpus == 0) return AddOk("CUDA driver", "none; without a GPU none is needed", findings);
    return AddFailure("CUDA driver", driver.error,
                      "install NVIDIA's driver (libcuda.so.1); in a container "
                      "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
                      findings);
  }
  const std::string what =
      absl::StrCat("driver for CUDA ", driver.version / 1000, ".", driver.version % 1000 / 10);
  if (driver.version < daemon::kLeastCudaDriver ||
      dlsym(driver.handle, "cuGetProcAddress_v2") == nullptr) {
    return AddFailure("CUDA driver", what + " is too old", daemon::kCudaDriverRemedy, findings);
  }
  AddOk("CUDA driver", what, findings);
}

void CheckNccl(const DoctorSubject& subject, std::size_t gpus, Findings* findings) {
  if (gpus == 0) return AddOk("NCCL", "not needed without a GPU", findings);
  const Library nccl = Open(subject.nccl_library, "ncclGetVersion");
  const char* const remedy =
      "install NCCL 2.19 or newer where the loader finds it, or set gradsyncd's option "
      "nccl_library";
  const char* const without = ": a job's ranks on this node must share one GPU";
  if (!nccl.error.empty()) {
    if (gpus == 1) return AddOk("NCCL", "none; a single GPU needs none", findings);
    return AddWarning("NCCL", nccl.error + without, remedy, findings);
  }
  const std::string version = absl::StrCat("NCCL ", nccl.version / 10000, ".",
                                           nccl.version / 100 % 100, ".", nccl.version % 100);
  if (nccl.version < kLeastNccl) {
    return AddWarning("NCCL", absl::StrCat(version, " is too old", without), remedy, findings);
  }
  AddOk("NCCL", version, findings);
}

// How the machine's MPS control daemon was started, if it can be seen.
enum class MpsServer { kUnseen, kOneUser, kManyUsers };

MpsServer FindMpsServer(const std::string& root) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/proc", error)) {
    std::ifstream file(entry.path() / "cmdline");
    const std::string line{std::istreambuf_iterator<char>(file), {}};
    if (!absl::StrContains(line.substr(0, line.find('\0')), "nvidia-cuda-mps-control")) continue;
    return absl::StrContains(line, "-multiuser-server") ? MpsServer::kManyUsers
                                                        : MpsServer::kOneUser;
  }
  return MpsServer::kUnseen;
}

}  // namespace

std::size_t CheckDeviceFiles(const DoctorSubject& subject, Findings* findings) {
  const std::string folder = subject.root + "/dev";
  std::size_t gpus = 0;
  std::vector<std::string> closed;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool is_gpu = IsGpuFile(name);
    if (!is_gpu && name != "nvidiactl" && name != "nvidia-uvm") continue;
    gpus += is_gpu ? 1 : 0;
    if (access(entry.path().c_str(), R_OK | W_OK) != 0) closed.push_back("/dev/" + name);
  }
  const bool loaded = Exists(subject.root + "/proc/driver/nvidia/version");
  if (gpus == 0) {
    if (loaded) {
      AddFailure(
          "GPUs", "NVIDIA's driver is loaded, but there is no /dev/nvidia0 here",
          "give the container its GPUs (--gpus, NVIDIA_VISIBLE_DEVICES, nvidia.com/gpu); under "
          "systemd see deploy/systemd/gpu.conf; on the host run nvidia-smi once",
          findings);
    } else {
      AddOk("GPUs", "none: gradients stay in host memory", findings);
    }
    return 0;
  }
  const std::string what = absl::StrCat(gpus, gpus == 1 ? " GPU" : " GPUs");
  std::sort(closed.begin(), closed.end());
  if (!closed.empty()) {
    AddFailure(
        "GPUs",
        absl::StrCat(what, "; this user may not read and write ", absl::StrJoin(closed, ", ")),
        "join the files' group (ls -l /dev/nvidia*), or set ModifyDeviceFiles with mode 0666 in "
        "NVIDIA's module options",
        findings);
  } else if (!Exists(folder + "/nvidiactl") || !Exists(folder + "/nvidia-uvm")) {
    AddFailure("GPUs", what + ", but /dev/nvidiactl or /dev/nvidia-uvm is missing",
               "run nvidia-modprobe -u -c=0 as root, once after each boot", findings);
  } else {
    AddOk("GPUs", what, findings);
  }
  return gpus;
}

void CheckLibraries(const DoctorSubject& subject, std::size_t gpus, Findings* findings) {
  CheckDriver(subject, gpus, findings);
  CheckNccl(subject, gpus, findings);
}

void CheckMps(const DoctorSubject& subject, std::size_t gpus, const DaemonProcessOwner& owner,
              Findings* findings) {
  if (gpus == 0) return AddOk("MPS", "not needed without a GPU", findings);
  const bool here = Exists(absl::StrCat(subject.root, subject.mps_pipe_directory, "/control"));
  const bool asked = subject.daemon.ok() && subject.daemon->cuda().gpus_size() > 0;
  const bool there =
      asked &&
      std::any_of(subject.daemon->cuda().gpus().begin(), subject.daemon->cuda().gpus().end(),
                  [](const v1::GpuStatus& gpu) { return gpu.sharing() == v1::GPU_SHARING_MPS; });
  if (!here && !there) {
    findings->push_back({"MPS", Verdict::kOk,
                         "off: trainers and daemon take turns on a GPU, and little overlaps",
                         "for overlap, turn MPS on; a fatal fault then reaches all who share it: "
                         "deploy/README.md, MPS"});
    return;
  }
  if (asked && here != there) {
    const std::string pipes = absl::StrCat("CUDA_MPS_PIPE_DIRECTORY=", subject.mps_pipe_directory);
    return AddWarning("MPS",
                      here
                          ? "trainers of this shell use it, the daemon's workers do not: they take "
                            "turns on a GPU"
                          : "the daemon's workers use it, trainers of this shell do not: they take "
                            "turns on a GPU",
                      here ? absl::StrCat("give gradsyncd ", pipes,
                                          " (PrivateTmp= hides /tmp: deploy/systemd/gpu.conf)")
                           : "give trainers the daemon's CUDA_MPS_PIPE_DIRECTORY",
                      findings);
  }
  if (!owner.known || owner.uid == geteuid()) return AddOk("MPS", "on", findings);
  switch (FindMpsServer(subject.root)) {
    case MpsServer::kManyUsers:
      return AddOk("MPS", "on, for several users", findings);
    case MpsServer::kOneUser:
      return AddFailure(
          "MPS",
          absl::StrCat("on for one user at a time, and the daemon is user ", owner.uid,
                       ": one waits until the other ends"),
          "start nvidia-cuda-mps-control -d -multiuser-server and set mps_multiuser, or "
          "run gradsyncd as the trainers' user",
          findings);
    case MpsServer::kUnseen:
      return AddWarning("MPS", "on; this process cannot see whether it serves several users",
                        "start it with -multiuser-server: the daemon runs as another user",
                        findings);
  }
}

}  // namespace gradsync
