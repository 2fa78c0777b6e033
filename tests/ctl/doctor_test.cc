// The doctor on machines of the test's own making: folders in place of /dev, /proc and /sys.

#include "tools/gradsyncctl/doctor/doctor.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/base/unique_fd.h"
#include "daemon/base/version.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ctl/fake_introspection.h"
#include "tests/fakes/control.h"
#include "tests/kit/temporary_directory.h"
#include "tools/gradsyncctl/json.h"
#include "tools/gradsyncctl/render.h"

namespace {

// Whether the kernel is older than Linux 6.16.
bool passes_descriptors = false;

}  // namespace

// Takes the place of the C library's.
extern "C" int setsockopt(int fd, int level, int name, const void* optval,
                          socklen_t optlen) noexcept {
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS; Debian 12's headers lack it
  if (passes_descriptors && level == SOL_SOCKET && name == kPassRights) {
    errno = ENOPROTOOPT;
    return -1;
  }
  return static_cast<int>(syscall(SYS_setsockopt, fd, level, name, optval, optlen));
}

namespace gradsync {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

class DoctorTest : public testing::Test {
 protected:
  DoctorTest() {
    subject_.root = directory_.File("root");
    subject_.socket = directory_.File("d.sock");
    subject_.timeout = absl::Seconds(2);
    subject_.cuda_library = "libcuda-of-no-machine.so.1";
    subject_.nccl_library = "libnccl-of-no-machine.so.2";
    Write("/proc/self/uid_map", "         0          0 4294967295\n");
  }

  // A file of the machine.
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = subject_.root + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  void AddGpus(int count) const {
    for (int i = 0; i < count; ++i) Write(absl::StrCat("/dev/nvidia", i), "");
    Write("/dev/nvidiactl", "");
    Write("/dev/nvidia-uvm", "");
    Write("/dev/nvidia-caps/nvidia-cap1", "");
    Write("/proc/driver/nvidia/version", "NVRM");
  }

  // Both sockets of a daemon of this process.
  void Listen() {
    stream_ = ListenAt(subject_.socket, SOCK_STREAM);
    packets_ = ListenAt(directory_.File("d-fd.sock"), SOCK_SEQPACKET);
    v1::GetStatusResponse status;
    status.set_version(std::string(daemon::kVersion));
    status.set_state(v1::DAEMON_STATE_SERVING);
    status.mutable_cuda()->set_driver_error("no CUDA driver: libcuda.so.1");
    subject_.daemon = status;
  }
  v1::GetStatusResponse& daemon() { return *subject_.daemon; }
  // Sets the GPUs that the daemon has found.
  void DaemonSees(int gpus, v1::GpuSharing sharing) {
    v1::CudaStatus& cuda = *daemon().mutable_cuda();
    cuda.clear_driver_error();
    cuda.set_driver_version("13.0");
    cuda.set_nccl_version("2.28.9");
    for (int i = 0; i < gpus; ++i) cuda.add_gpus()->set_sharing(sharing);
  }

  // The gravest finding of a check.
  Finding Of(const std::string& check) const {
    Finding gravest;
    for (const Finding& finding : Diagnose(subject_)) {
      if (finding.check != check) continue;
      if (gravest.check.empty() || finding.verdict > gravest.verdict) gravest = finding;
    }
    EXPECT_EQ(gravest.check, check) << "was not checked";
    return gravest;
  }

  static daemon::UniqueFd ListenAt(const std::string& path, int type) {
    daemon::UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd.get(), 8), 0);
    EXPECT_EQ(chmod(path.c_str(), 0660), 0);
    return fd;
  }

  const TemporaryDirectory directory_;
  DoctorSubject subject_;
  daemon::UniqueFd stream_;
  daemon::UniqueFd packets_;
};

TEST_F(DoctorTest, MachineWithoutGpuHasNoProblem) {
  Listen();
  for (const Finding& finding : Diagnose(subject_)) {
    EXPECT_EQ(finding.verdict, Verdict::kOk) << finding.check << ": " << finding.what;
    EXPECT_THAT(finding.remedy, IsEmpty());
  }
  EXPECT_THAT(Of("GPUs").what, StartsWith("none"));
  EXPECT_THAT(Of("peer port").what, StartsWith("off"));
}

TEST_F(DoctorTest, EveryProblemHasARemedy) {
  AddGpus(2);
  Write("/proc/self/uid_map", "0 1000 1\n");
  std::size_t problems = 0;
  for (const Finding& finding : Diagnose(subject_)) {
    if (finding.verdict == Verdict::kOk) continue;
    ++problems;
    EXPECT_NE(finding.remedy, "") << finding.what;
    for (const std::string& line : {finding.what, finding.remedy}) {
      EXPECT_EQ(line.find('\n'), std::string::npos);
    }
  }
  EXPECT_GE(problems, 5u);
}

TEST_F(DoctorTest, MissingDaemonNamesTheStartCommand) {
  const Finding finding = Of("socket");
  EXPECT_EQ(finding.verdict, Verdict::kFailure);
  EXPECT_EQ(finding.what, "there is no " + subject_.socket);
  EXPECT_THAT(finding.remedy, HasSubstr("start gradsyncd"));
  EXPECT_EQ(Of("fd socket").verdict, Verdict::kFailure);
}

TEST_F(DoctorTest, SocketWithoutListenerIsReported) {
  Listen();
  stream_.reset();
  EXPECT_EQ(Of("socket").what, "nobody listens at " + subject_.socket);
  EXPECT_EQ(Of("fd socket").verdict, Verdict::kOk);
}

TEST_F(DoctorTest, SocketOfAnotherKindIsReported) {
  Listen();
  packets_.reset();
  std::filesystem::remove(directory_.File("d-fd.sock"));
  packets_ = ListenAt(directory_.File("d-fd.sock"), SOCK_STREAM);
  EXPECT_THAT(Of("fd socket").what, HasSubstr("of another kind"));
}

TEST_F(DoctorTest, SocketOpenToEveryUserIsAWarning) {
  Listen();
  ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(subject_.socket.c_str(), 0666), 0);
  EXPECT_EQ(Of("socket").verdict, Verdict::kWarning);
  EXPECT_THAT(Of("socket").remedy, HasSubstr("socket_mode"));
}

TEST_F(DoctorTest, OtherUsersDaemonThatClientsCanStopIsNamed) {
  constexpr uid_t kOther = 12345;
  Listen();
  EXPECT_THAT(Of("daemon's user").what, Not(HasSubstr("6.16")));
  bool is_other = false;
  std::thread([&] {
    // For this thread alone. The kernel notes who listened last.
    is_other = syscall(SYS_setresuid, kOther, kOther, kOther) == 0 && listen(stream_.get(), 8) == 0;
  }).join();
  if (!is_other) GTEST_SKIP() << "it cannot become another user";
  passes_descriptors = true;
  const Finding finding = Of("daemon's user");
  passes_descriptors = false;
  EXPECT_THAT(finding.what, StartsWith("user 12345"));
  EXPECT_THAT(finding.what, HasSubstr("before Linux 6.16"));
}

TEST_F(DoctorTest, ReachedCgroupMemoryLimitIsAWarning) {
  EXPECT_EQ(Of("memory limit").what, "none by a cgroup");
  Write("/proc/self/cgroup", "0::/pod/trainer\n");
  Write("/sys/fs/cgroup/pod/trainer/memory.max", "max\n");
  Write("/sys/fs/cgroup/pod/trainer/memory.current", "4096\n");
  EXPECT_EQ(Of("memory limit").what, "none by a cgroup");
  Write("/sys/fs/cgroup/pod/memory.max", "34359738368\n");
  Write("/sys/fs/cgroup/pod/memory.current", "17179869184\n");
  EXPECT_EQ(Of("memory limit").what, "16.0 GiB left of 32.0 GiB by the cgroup");
  EXPECT_EQ(Of("memory limit").verdict, Verdict::kOk);
  Write("/sys/fs/cgroup/pod/memory.current", "34359738000\n");
  EXPECT_EQ(Of("memory limit").verdict, Verdict::kWarning);
}

TEST_F(DoctorTest, UserNamespaceIsAWarning) {
  Write("/proc/self/uid_map", "         0       1000          1\n");
  EXPECT_EQ(Of("user namespace").verdict, Verdict::kWarning);
}

TEST_F(DoctorTest, LowDescriptorLimitOfTheDaemonIsAWarning) {
  Listen();
  Write(absl::StrCat("/proc/", getpid(), "/limits"),
        "Limit           Soft Limit  Hard Limit  Units\nMax open files  64  64  files\n");
  const Finding finding = Of("descriptors");
  EXPECT_EQ(finding.verdict, Verdict::kWarning);
  EXPECT_THAT(finding.what, HasSubstr("the daemon may open 64"));
}

TEST_F(DoctorTest, HiddenGpusAreAFailure) {
  Write("/proc/driver/nvidia/version", "NVRM");
  EXPECT_EQ(Of("GPUs").verdict, Verdict::kFailure);
  EXPECT_THAT(Of("GPUs").remedy, HasSubstr("gpu.conf"));
}

TEST_F(DoctorTest, MissingDeviceFileIsAFailure) {
  AddGpus(1);
  EXPECT_EQ(Of("GPUs").what, "1 GPU");
  std::filesystem::remove(subject_.root + "/dev/nvidia-uvm");
  EXPECT_EQ(Of("GPUs").verdict, Verdict::kFailure);
  EXPECT_THAT(Of("GPUs").remedy, HasSubstr("nvidia-modprobe"));
}

TEST_F(DoctorTest, GpusWithoutADriverAreAFailure) {
  AddGpus(2);
  EXPECT_EQ(Of("CUDA driver").verdict, Verdict::kFailure);
  EXPECT_THAT(Of("CUDA driver").what, HasSubstr("libcuda-of-no-machine.so.1"));
  EXPECT_EQ(Of("NCCL").verdict, Verdict::kWarning);
}

TEST_F(DoctorTest, FindsDriverAndNccl) {
  AddGpus(2);
  // The machine of this process, from its first call of a fake on.
  const fakes::FakeMachine machine(fakes::MachineWithGpus(2));
  static std::string environment = machine.Environment();
  ASSERT_EQ(putenv(environment.data()), 0);
  subject_.cuda_library = std::filesystem::absolute("tests/fakes/cuda/libcuda.so.1");
  subject_.nccl_library = std::filesystem::absolute("tests/fakes/nccl/libnccl.so.2");
  EXPECT_EQ(Of("CUDA driver").what, "driver for CUDA 13.0");
  EXPECT_EQ(Of("NCCL").what, "NCCL 2.28.9");
}

TEST_F(DoctorTest, OldLibrariesAreReported) {
  AddGpus(2);
  subject_.cuda_library = std::filesystem::absolute("tests/cuda/libold.so");
  subject_.nccl_library = subject_.cuda_library;
  EXPECT_THAT(Of("CUDA driver").what, HasSubstr("too old"));
  EXPECT_THAT(Of("CUDA driver").remedy, HasSubstr("CUDA 13.0 or newer (580 or newer)"));
  EXPECT_THAT(Of("NCCL").what, HasSubstr("is too old"));
}

TEST_F(DoctorTest, GpusHiddenFromTheDaemonAreAFailure) {
  AddGpus(2);
  Listen();
  EXPECT_EQ(Of("daemon's GPUs").verdict, Verdict::kFailure);
  EXPECT_THAT(Of("daemon's GPUs").remedy, HasSubstr("PrivateDevices=yes"));
  DaemonSees(1, v1::GPU_SHARING_TIME_SLICED);
  EXPECT_EQ(Of("daemon's GPUs").what, "it sees 1 of the 2 here");
  DaemonSees(1, v1::GPU_SHARING_TIME_SLICED);
  EXPECT_EQ(Of("daemon's GPUs").verdict, Verdict::kOk);
}

TEST_F(DoctorTest, FailedWorkerIsShown) {
  AddGpus(1);
  Listen();
  DaemonSees(1, v1::GPU_SHARING_TIME_SLICED);
  v1::WorkerStatus& worker = *daemon().mutable_cuda()->add_workers();
  worker.set_job_id("digits");
  worker.set_state(v1::WORKER_STATE_FAILED);
  worker.set_last_failure("ECC");
  EXPECT_EQ(Of("workers").what, "job digits: ECC");
}

TEST_F(DoctorTest, MpsOnOneSideOnlyIsAWarning) {
  AddGpus(1);
  Listen();
  subject_.mps_pipe_directory = "/tmp/nvidia-mps";
  DaemonSees(1, v1::GPU_SHARING_TIME_SLICED);
  EXPECT_EQ(Of("MPS").verdict, Verdict::kOk) << "it is not needed";
  EXPECT_THAT(Of("MPS").remedy, HasSubstr("a fatal fault then reaches all"));
  Write("/tmp/nvidia-mps/control", "");
  EXPECT_EQ(Of("MPS").verdict, Verdict::kWarning);
  EXPECT_THAT(Of("MPS").remedy, HasSubstr("CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"));
  daemon().mutable_cuda()->mutable_gpus(0)->set_sharing(v1::GPU_SHARING_MPS);
  EXPECT_EQ(Of("MPS").what, "on");
  subject_.mps_pipe_directory = "/elsewhere";
  EXPECT_EQ(Of("MPS").verdict, Verdict::kWarning);
}

TEST_F(DoctorTest, WarningsOfTheDaemonAreShown) {
  Listen();
  daemon().add_warnings("the peer port has no TLS");
  EXPECT_EQ(Of("daemon").what, "the peer port has no TLS");
  daemon().clear_warnings();
  daemon().set_version("0.0.1");
  EXPECT_THAT(Of("daemon").what, HasSubstr("gradsyncd 0.0.1 differs from gradsyncctl"));
}

TEST_F(DoctorTest, SilentDaemonIsAFailure) {
  Listen();
  subject_.daemon = absl::DeadlineExceededError("the daemon did not answer within 1s");
  EXPECT_EQ(Of("daemon").verdict, Verdict::kFailure);
}

TEST_F(DoctorTest, ClosedPeerPortIsAFailure) {
  Listen();
  daemon().set_peer_address("127.0.0.1:1");
  EXPECT_EQ(Of("peer port").verdict, Verdict::kFailure);
  EXPECT_THAT(Of("peer port").what, HasSubstr("127.0.0.1:1: Connection refused"));
}

TEST(DoctorAnswerTest, IsTextOrJson) {
  const std::vector<Finding> findings = {
      {"kernel", Verdict::kOk, "Linux 6.1", ""},
      {"socket", Verdict::kFailure, "there is no \033d.sock", "start it"},
      {"MPS", Verdict::kWarning, "on", "look"}};
  EXPECT_EQ("\n" + RenderDoctor(findings), R"(
ok    kernel          Linux 6.1
FAIL  socket          there is no ?d.sock
                      -> start it
WARN  MPS             on
                      -> look

1 failure, 1 warning
)");
  EXPECT_THAT(RenderDoctor({findings[0]}), HasSubstr("\nall well\n"));
  EXPECT_THAT(DoctorToJson(HealthCode::kErr, findings), HasSubstr(R"("verdict": "failure")"));
}

}  // namespace
}  // namespace gradsync
