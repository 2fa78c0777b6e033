// What status shows about GPUs, and the quota of their memory: a real gradsyncd with its workers on
// fakes of the driver.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"
#include "tests/cuda/cuda_rank.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"
#include "tests/kit/test_daemon.h"

namespace gradsync {
namespace {

using fakes::FakeMachine;
using fakes::GpuUuid;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kMebibyte = 1 << 20;
constexpr uid_t kOtherUser = 65533;
constexpr int kPassed = 3;  // the first descriptor that a role gets

// The path of a file that the build puts beside this program.
std::string Absolute(const std::string& path) { return std::filesystem::absolute(path).string(); }

class GpuNode {
 public:
  explicit GpuNode(std::vector<std::string> flags = {}) : daemon_(With(std::move(flags))) {}

  FakeMachine& machine() { return machine_; }
  TestDaemon& daemon() { return daemon_; }

  v1::CudaStatus Status() { return daemon_.Status().cuda(); }
  // Waits until the daemon has looked for GPUs.
  v1::CudaStatus Found() {
    EXPECT_TRUE(daemon_.AwaitStatus(
        [](const auto& status) { return !status.cuda().driver_version().empty(); }));
    return Status();
  }

  // Joins as the only rank of a job.
  std::unique_ptr<Session> Join(const std::string& job) {
    SessionOptions options;
    options.socket = daemon_.socket();
    options.job_id = job;
    auto session = Session::Join(options);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

 private:
  static std::vector<std::string> With(std::vector<std::string> flags) {
    flags.push_back("--cuda_library=" + Absolute("tests/fakes/cuda/libcuda.so.1"));
    flags.push_back("--nccl_library=" + Absolute("tests/fakes/nccl/libnccl.so.2"));
    flags.push_back("--nvml_library=" + Absolute("tests/fakes/nvml/libnvidia-ml.so.1"));
    return flags;
  }

  FakeMachine machine_;
  TestDaemon daemon_;
};

LayoutSpec SpecOf(std::uint64_t bytes, int gpu = 0) {
  LayoutSpec spec;
  spec.device = GpuUuid(gpu);
  spec.parameters = {{"weight", {bytes / sizeof(float)}}};
  return spec;
}

MachineDescription With(void (*change)(MachineDescription*)) {
  MachineDescription machine = MachineWithGpus(1);
  change(&machine);
  return machine;
}

ISOLATED_TEST(GpuStatus, ShowsGpusAndWorkers, MachineWithGpus(2)) {
  GpuNode node;
  const v1::CudaStatus found = node.Found();
  EXPECT_EQ(found.driver_version(), "13.0");
  EXPECT_EQ(found.nccl_version(), "2.28.9");
  EXPECT_EQ(found.gate(), "auto");
  ASSERT_EQ(found.gpus_size(), 2);
  EXPECT_EQ(found.gpus(1).uuid(), GpuUuid(1));
  EXPECT_EQ(found.gpus(1).sharing(), v1::GPU_SHARING_TIME_SLICED);
  EXPECT_FALSE(found.gpus(1).has_free_bytes()) << "this GPU has no worker that could report it";
  EXPECT_EQ(found.workers_size(), 0);

  const auto session = node.Join("job");
  const auto layout = session->RegisterLayout(SpecOf(5 * kMebibyte, 1));
  ASSERT_TRUE(layout.ok()) << layout.status();
  const v1::GetStatusResponse all = node.daemon().Status();
  const v1::CudaStatus& status = all.cuda();
  ASSERT_EQ(status.workers_size(), 1);
  const v1::WorkerStatus& worker = status.workers(0);
  EXPECT_EQ(worker.job_id(), "job");
  EXPECT_EQ(worker.gpu(), GpuUuid(1));
  EXPECT_EQ(worker.state(), v1::WORKER_STATE_RUNNING);
  EXPECT_EQ(worker.restarts(), 0u);
  EXPECT_EQ(worker.legacy_arenas(), 0u);
  EXPECT_EQ(worker.arena_bytes(), 6 * kMebibyte) << "rounded up to whole granules";
  EXPECT_GE(worker.staging_bytes(), 4 * 5 * kMebibyte);
  EXPECT_EQ(worker.context_bytes(), MachineDescription().context_bytes);
  EXPECT_EQ(all.jobs(0).sessions(0).gpu_bytes(), 6 * kMebibyte);
  EXPECT_EQ(status.gpus(1).free_bytes(),
            status.gpus(1).memory_bytes() - node.machine().DeviceBytes(1));

  kill(worker.pid(), SIGKILL);
  EXPECT_TRUE(node.daemon().AwaitStatus([](const v1::GetStatusResponse& after) {
    return after.cuda().workers_size() == 1 &&
           after.cuda().workers(0).state() == v1::WORKER_STATE_FAILED;
  }));
  EXPECT_THAT(node.Status().workers(0).last_failure(), HasSubstr("killed by signal 9"));
  const auto again = node.Join("job");
  ASSERT_TRUE(again->RegisterLayout(SpecOf(kMebibyte, 1)).ok());
  EXPECT_EQ(node.Status().workers(0).restarts(), 1u);
}

ISOLATED_TEST(GpuStatus, ShowsWhyNcclCannotBeUsed,
              With([](MachineDescription* machine) { machine->nccl_version = 21805; })) {
  GpuNode node;
  const v1::CudaStatus found = node.Found();
  EXPECT_THAT(found.nccl_version(), IsEmpty());
  const std::string why = "is version 2.18.5: gradsync needs NCCL 2.19.0";
  EXPECT_THAT(found.nccl_error(), HasSubstr(why));
  EXPECT_EQ(node.daemon().Stop(), 0);  // the daemon logs the line just after it shows the status
  EXPECT_THAT(node.daemon().Log(),
              AllOf(HasSubstr("no NCCL: a job's trainers must share one GPU"), HasSubstr(why)));
}

ISOLATED_TEST(GpuStatus, ShowsWhyArenasAreSharedByLegacyIpc,
              With([](MachineDescription* machine) { machine->gpus[0].posix_handles = false; })) {
  GpuNode node;
  const auto session = node.Join("job");
  const auto layout = session->RegisterLayout(SpecOf(kMebibyte));
  ASSERT_TRUE(layout.ok()) << layout.status();
  const v1::CudaStatus status = node.Status();
  EXPECT_EQ(status.workers(0).legacy_arenas(), 1u);
  EXPECT_THAT(status.workers(0).why_legacy(), HasSubstr("file descriptor"));
}

MachineDescription WithMps() {
  return With([](MachineDescription* machine) { machine->mps = true; });
}

ROLE(other_user) {
  if (setuid(kOtherUser) != 0) return 1;
  SessionOptions options;
  options.socket = std::getenv("SOCKET");
  options.job_id = "of another user";
  const auto session = Session::Join(options);
  EXPECT_TRUE(session.ok()) << session.status();
  if (!session.ok()) return 1;
  const absl::Status refused = (*session)->RegisterLayout(SpecOf(kMebibyte)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_EQ(ErrorReason(refused), std::getenv("REASON"));
  return testing::Test::HasFailure() ? 1 : 0;
}

ISOLATED_TEST(Mps, AnotherUserIsRefusedWithARemedy, WithMps()) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be another user";
  GpuNode node({"--socket_mode=0666"});
  ASSERT_EQ(chmod(node.daemon().directory().path().c_str(), 0755), 0);
  const auto other = fakes::StartRole(
      "other_user", {}, {"SOCKET=" + node.daemon().socket(), "REASON=MPS_OTHER_USER"});
  EXPECT_TRUE(fakes::Succeeds(*other));
}

// Holds memory of the GPU until it is killed.
ROLE(trainer) {
  SessionOptions options;
  options.socket = std::getenv("SOCKET");
  options.job_id = "job";
  const auto session = Session::Join(options);
  if (!session.ok()) return 1;
  const auto layout = (*session)->RegisterLayout(SpecOf(kMebibyte));
  if (!layout.ok() || write(kPassed, "r", 1) != 1) return 1;
  for (;;) pause();
}

// If the worker frees it earlier, the behaviour is undefined.
ISOLATED_TEST(LegacyIpc, MemoryIsKeptUntilTheTrainerEnds,
              With([](MachineDescription* machine) { machine->gpus[0].posix_handles = false; })) {
  GpuNode node;
  const auto await_arenas = [&](std::uint32_t arenas) {
    return node.daemon().AwaitStatus([=](const v1::GetStatusResponse& status) {
      return status.cuda().workers_size() == 1 &&
             status.cuda().workers(0).legacy_arenas() == arenas;
    });
  };
  auto session = node.Join("job");
  const auto layout = session->RegisterLayout(SpecOf(kMebibyte));
  ASSERT_TRUE(layout.ok()) << layout.status();
  session.reset();  // the layout stays mapped in this process
  int ready[2] = {-1, -1};
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const Descriptor readable(ready[0]);
  const Descriptor writable(ready[1]);
  const auto trainer =
      fakes::StartRole("trainer", {writable.get()}, {"SOCKET=" + node.daemon().socket()});
  ASSERT_TRUE(AwaitReadable(readable.get(), kPatienceMs));
  EXPECT_TRUE(await_arenas(2));
  trainer->Kill();
  EXPECT_TRUE(await_arenas(1));
  EXPECT_THAT(node.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(LegacyIpc, CarriesAStepAndIsLogged,
              With([](MachineDescription* machine) { machine->gpus[0].posix_handles = false; })) {
  GpuNode node;
  CudaRank first(0);
  CudaRank second(0);
  SessionOptions options;
  options.socket = node.daemon().socket();
  options.job_id = "job";
  options.world_size = 2;
  const auto join = [&options](CudaRank& rank, std::uint32_t number) {
    SessionOptions of_rank = options;
    of_rank.rank = number;
    EXPECT_TRUE(rank.Join(of_rank).ok());
    const absl::Status registered = rank.Register(CudaLayout(0, 2, 1000));
    EXPECT_TRUE(registered.ok()) << registered;
  };
  std::thread other([&] { join(second, 1); });
  join(first, 0);
  other.join();
  EXPECT_EQ(node.Status().workers(0).legacy_arenas(), 2u);
  EXPECT_THAT(node.daemon().Log(), AllOf(HasSubstr("GPU memory is shared by a legacy handle"),
                                         HasSubstr("exports no allocation as a file descriptor")));
  ASSERT_TRUE(first.Step(1, 4).ok());
  ASSERT_TRUE(second.Step(1, 6).ok());
  for (CudaRank* rank : {&first, &second}) {
    EXPECT_THAT(rank->Read(0), Each(5.0f));
    EXPECT_THAT(rank->Read(1), Each(6.0f));
    const auto result = rank->WaitStep(1);
    EXPECT_TRUE(result.ok()) << result.status();
  }
  EXPECT_THAT(node.machine().Violations(), IsEmpty());
}

// A script instead of MPS's control program. It records the commands that it gets.
class MpsControl {
 public:
  MpsControl() {
    std::ofstream(program()) << "#!/bin/sh\nread -r command\necho \"$command\" >>" << told_
                             << "\ncase \"$command\" in get_server_list) echo 70;; "
                             << "get_client_list*) cat " << clients_ << ";; esac\n";
    std::filesystem::permissions(program(), std::filesystem::perms::owner_all);
  }
  std::string program() const { return folder_.File("mps-control"); }
  void HasClient(pid_t pid) const { std::ofstream(clients_) << pid << "\n"; }
  std::string Told() const {
    std::ifstream file(told_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const TemporaryDirectory folder_;
  const std::string told_ = folder_.File("told");
  const std::string clients_ = folder_.File("clients");
};

// Stops a trainer with SIGSTOP until its lease expires. Returns its pid.
pid_t LoseAStoppedTrainer(const MpsControl& control) {
  GpuNode node({"--lease=1s", "--mps_control=" + control.program()});
  node.Found();
  int ready[2];
  EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const Descriptor readable(ready[0]);
  Descriptor writable(ready[1]);
  const auto trainer =
      fakes::StartRole("trainer", {writable.get()}, {"SOCKET=" + node.daemon().socket()});
  writable.Close();
  char byte = 0;
  EXPECT_TRUE(AwaitReadable(readable.get(), kPatienceMs));
  EXPECT_EQ(read(readable.get(), &byte, 1), 1) << "the trainer has failed";
  control.HasClient(trainer->pid());
  trainer->Signal(SIGSTOP);
  EXPECT_TRUE(node.daemon().AwaitStatus([](const v1::GetStatusResponse& status) {
    return status.jobs_size() == 1 && status.jobs(0).state() == v1::JOB_STATE_FAILED;
  }));
  // The daemon ends only after all its calls of MPS's program.
  EXPECT_EQ(node.daemon().Stop(), 0);
  return trainer->pid();
}

ISOLATED_TEST(Mps, TerminatesALostTrainerWhoseProcessLives, WithMps()) {
  const MpsControl control;
  const pid_t trainer = LoseAStoppedTrainer(control);
  EXPECT_EQ(control.Told(), absl::StrCat("get_server_list\nget_client_list 70\n",
                                         "terminate_client 70 ", trainer, "\n"));
}

ISOLATED_TEST(Mps, ControlProgramIsNotRunWithoutMps, MachineWithGpus(1)) {
  const MpsControl control;
  LoseAStoppedTrainer(control);
  EXPECT_THAT(control.Told(), IsEmpty());
}

ISOLATED_TEST(Mps, SharesAGpuInExclusiveProcessMode, With([](MachineDescription* machine) {
                machine->gpus[0].mode = fakes::ComputeMode::kExclusiveProcess;
              })) {
  GpuNode node;
  const auto session = node.Join("job");
  const absl::Status refused = session->RegisterLayout(SpecOf(kMebibyte)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_EQ(ErrorReason(refused), "GPU_EXCLUSIVE");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("start MPS (nvidia-cuda-mps-control -d)"));
}

ISOLATED_TEST(Mps, IsSeenByWorkerAndTrainer, WithMps()) {
  GpuNode node;
  EXPECT_EQ(node.Found().gpus(0).sharing(), v1::GPU_SHARING_MPS);
  const auto session = node.Join("job");
  const auto layout = session->RegisterLayout(SpecOf(kMebibyte));
  ASSERT_TRUE(layout.ok()) << layout.status();
  const v1::GetStatusResponse status = node.daemon().Status();
  ASSERT_EQ(status.jobs(0).sessions(0).gpu_uses_size(), 1);
  EXPECT_EQ(status.jobs(0).sessions(0).gpu_uses(0).sharing(), v1::GPU_SHARING_MPS);
  EXPECT_EQ(status.warnings_size(), 0) << status.warnings(0);
}

ISOLATED_TEST(GpuQuota, RefusesArenasBeyondTheQuotaAndCountsFreedOnes, MachineWithGpus(1)) {
  GpuNode node({"--quota_gpu_bytes_per_user=8MiB"});
  auto session = node.Join("job");
  const auto refused = session->RegisterLayout(SpecOf(9 * kMebibyte));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(ErrorReason(refused.status()), "QUOTA");
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("GPU memory and holds 0 of a quota of 8388608 (quota_gpu_bytes_per_user): "
                        "ask for less"));
  EXPECT_EQ(node.Status().arena_bytes(), 0u);
  for (int life = 0; life < 3; ++life) {
    const auto layout = session->RegisterLayout(SpecOf(7 * kMebibyte));
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(node.Status().arena_bytes(), 8 * kMebibyte);
    // This is another job of the same user.
    const auto other = node.Join("other");
    EXPECT_EQ(ErrorReason(other->RegisterLayout(SpecOf(kMebibyte)).status()), "QUOTA");
    EXPECT_TRUE(session->Leave().ok());
    session.reset();
    EXPECT_TRUE(node.daemon().AwaitStatus(
        [](const v1::GetStatusResponse& status) { return status.cuda().arena_bytes() == 0; }));
    session = node.Join("job");
  }
}

ISOLATED_TEST(GpuQuota, FullGpuIsRefusedWithItsFreeBytes, MachineWithGpus(1)) {
  GpuNode node;
  auto session = node.Join("job");
  // The machine's GPU has 1 GiB. Staging takes four buckets of it.
  for (const std::uint64_t mebibytes : {2048, 250}) {
    const auto refused = session->RegisterLayout(SpecOf(mebibytes * kMebibyte));
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
    EXPECT_EQ(ErrorReason(refused.status()), "GPU_OUT_OF_MEMORY");
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("free of 1073741824"));
    session = node.Join("job");
  }
  EXPECT_TRUE(session->RegisterLayout(SpecOf(kMebibyte)).ok());
  EXPECT_EQ(node.Status().workers(0).restarts(), 0u);
}

}  // namespace
}  // namespace gradsync
