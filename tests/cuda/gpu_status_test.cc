// What status tells of GPUs, and what their memory counts against: a real gradsyncd with its workers
// on fakes of the driver.

#include <gmock/gmock.h>
#include <signal.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "client/include/gradsync/client.h"
#include "tests/fakes/isolated_test.h"
#include "tests/fault/deadline.h"
#include "tests/fault/test_daemon.h"

namespace gradsync {
namespace {

using fakes::FakeMachine;
using fakes::GpuUuid;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kMebibyte = 1 << 20;

// Of what the build has put beside this program.
std::string Absolute(const std::string& path) { return std::filesystem::absolute(path).string(); }

class GpuNode {
 public:
  explicit GpuNode(std::vector<std::string> flags = {}) : daemon_(With(std::move(flags))) {}

  FakeMachine& machine() { return machine_; }
  fault::TestDaemon& daemon() { return daemon_; }

  v1::CudaStatus Status() { return daemon_.Status().cuda(); }
  // Once it has looked.
  v1::CudaStatus Found() {
    EXPECT_TRUE(daemon_.AwaitStatus(
        [](const auto& status) { return !status.cuda().driver_version().empty(); }));
    return Status();
  }

  // The only rank of a job.
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
    return flags;
  }

  FakeMachine machine_;
  fault::TestDaemon daemon_;
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

ISOLATED_TEST(GpuStatus, TellsOfGpusAndWorkers, MachineWithGpus(2)) {
  GpuNode node;
  const v1::CudaStatus found = node.Found();
  EXPECT_EQ(found.driver_version(), "13.0");
  EXPECT_EQ(found.nccl_version(), "2.28.9");
  ASSERT_EQ(found.gpus_size(), 2);
  EXPECT_EQ(found.gpus(1).uuid(), GpuUuid(1));
  EXPECT_EQ(found.gpus(1).sharing(), v1::GPU_SHARING_TIME_SLICED);
  EXPECT_FALSE(found.gpus(1).has_free_bytes()) << "no worker is there to tell";
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
  EXPECT_EQ(worker.arena_bytes(), 6 * kMebibyte) << "in whole granules";
  EXPECT_GE(worker.staging_bytes(), 4 * 5 * kMebibyte);
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

ISOLATED_TEST(GpuStatus, SaysWhyNcclCannotBeUsed,
              With([](MachineDescription* machine) { machine->nccl_version = 21805; })) {
  GpuNode node;
  const v1::CudaStatus found = node.Found();
  EXPECT_THAT(found.nccl_version(), IsEmpty());
  EXPECT_THAT(found.nccl_error(), HasSubstr("is version 2.18.5: gradsync needs NCCL 2.19.0"));
}

ISOLATED_TEST(GpuStatus, SaysThatKernelsOverlap,
              With([](MachineDescription* machine) { machine->mps = true; })) {
  GpuNode node;
  EXPECT_EQ(node.Found().gpus(0).sharing(), v1::GPU_SHARING_MPS);
}

ISOLATED_TEST(GpuStatus, SaysWhyArenasAreSharedByLegacyIpc,
              With([](MachineDescription* machine) { machine->gpus[0].posix_handles = false; })) {
  GpuNode node;
  const auto session = node.Join("job");
  const auto layout = session->RegisterLayout(SpecOf(kMebibyte));
  ASSERT_TRUE(layout.ok()) << layout.status();
  const v1::CudaStatus status = node.Status();
  EXPECT_EQ(status.workers(0).legacy_arenas(), 1u);
  EXPECT_THAT(status.workers(0).why_legacy(), HasSubstr("file descriptor"));
}

ISOLATED_TEST(GpuQuota, RefusesMoreThanAUserMayHaveAndGetsItBack, MachineWithGpus(1)) {
  GpuNode node({"--quota_gpu_bytes_per_user=8MiB"});
  auto session = node.Join("job");
  const auto refused = session->RegisterLayout(SpecOf(9 * kMebibyte));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(ErrorReason(refused.status()), "QUOTA");
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("GPU memory and holds 0 of a quota of 8388608 (quota_gpu_bytes_per_user)"));
  EXPECT_EQ(node.Status().arena_bytes(), 0u);
  for (int life = 0; life < 3; ++life) {
    const auto layout = session->RegisterLayout(SpecOf(7 * kMebibyte));
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(node.Status().arena_bytes(), 8 * kMebibyte);
    // Another job of the same user.
    const auto other = node.Join("other");
    EXPECT_EQ(ErrorReason(other->RegisterLayout(SpecOf(kMebibyte)).status()), "QUOTA");
    EXPECT_TRUE(session->Leave().ok());
    session.reset();
    EXPECT_TRUE(node.daemon().AwaitStatus(
        [](const v1::GetStatusResponse& status) { return status.cuda().arena_bytes() == 0; }));
    session = node.Join("job");
  }
}

ISOLATED_TEST(GpuQuota, SaysWhatTheGpuLacks, MachineWithGpus(1)) {
  GpuNode node;
  auto session = node.Join("job");
  // The machine's GPU has 1 GiB, of which four buckets are for summing.
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
