// What a worker reports at Start, and which GPUs it refuses.

#include <gmock/gmock.h>

#include "daemon/base/error.h"
#include "tests/worker/cuda_worker_fixture.h"

namespace gradsync::daemon {
namespace {

using fakes::GpusThatMayBeOne;
using fakes::GpuUuid;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

MachineDescription With(void (*change)(MachineDescription*)) {
  MachineDescription machine = MachineWithGpus(2);
  change(&machine);
  return machine;
}

std::string ReasonOf(const absl::StatusOr<worker::Reply>& reply) {
  return DetailsOf(reply.status()).reason;
}

ISOLATED_TEST(CudaStart, ListsGpusWithoutAContext, MachineWithGpus(2)) {
  CudaWorkerFixture worker;
  const auto found = worker.Start("");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_GE(found->started().driver_version(), 13000);
  ASSERT_EQ(found->started().devices_size(), 2);
  EXPECT_EQ(found->started().devices(1).uuid(), GpuUuid(1));
  EXPECT_FALSE(found->started().devices(1).mps());
  EXPECT_GT(found->started().devices(1).memory_bytes(), 0u);
  const fakes::FakeMachine& machine = worker.machine();
  if (!machine.fake()) return;
  EXPECT_EQ(found->started().driver_version(), 13000);
  EXPECT_EQ(found->started().nccl_version(), "2.28.9");
  EXPECT_EQ(machine.Calls("cuDevicePrimaryCtxRetain", worker.process().pid()), 0u);
}

ISOLATED_TEST(CudaStart, OpensTheGpuOfAUuidAndLoadsEveryKernel, GpusThatMayBeOne(2)) {
  CudaWorkerFixture worker;
  const fakes::FakeMachine& machine = worker.machine();
  const std::size_t before = machine.fake() ? machine.DeviceBytes(1) : 0;
  const auto started = worker.Start(GpuUuid(1));
  ASSERT_TRUE(started.ok()) << started.status();
  ASSERT_EQ(started->started().devices_size(), 1);
  EXPECT_EQ(started->started().devices(0).uuid(), GpuUuid(1));
  if (!machine.fake()) return;
  EXPECT_GT(machine.DeviceBytes(1), before);
  EXPECT_EQ(machine.Calls("cuFuncLoad", worker.process().pid()), 20u);
  worker.Stop();
  EXPECT_EQ(machine.DeviceBytes(1), before);
  EXPECT_THAT(machine.Violations(), IsEmpty());
}

// Such a driver has every function, but cannot load kernels that a CUDA 13 compiler made.
ISOLATED_TEST(CudaStart, RefusesADriverOlderThanItsKernels,
              With([](MachineDescription* machine) { machine->driver_version = 12090; })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(0));
  EXPECT_EQ(started.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(started), "CUDA_DRIVER_TOO_OLD");
  EXPECT_THAT(started.status().message(), HasSubstr("is a driver for CUDA 12.9"));
  EXPECT_THAT(started.status().message(), HasSubstr("580 or newer"));
  EXPECT_EQ(worker.machine().Calls("cuInit", worker.process().pid()), 0u);
}

ISOLATED_TEST(CudaStart, MissingGpuIsRefusedWithTheVisibleOnes, MachineWithGpus(2)) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(7));
  EXPECT_EQ(started.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(started), "GPU_NOT_VISIBLE");
  EXPECT_THAT(started.status().message(), HasSubstr(GpuUuid(0) + ", " + GpuUuid(1)));
  EXPECT_THAT(started.status().message(), HasSubstr("DeviceAllow="));
}

ISOLATED_TEST(CudaStart, WorksOnOneGpuWithoutAUsableNccl,
              With([](MachineDescription* machine) { machine->nccl_version = 21805; })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(0));
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_EQ(started->started().nccl_version(), "");
  EXPECT_THAT(started->started().nccl_error(), HasSubstr("2.18.5"));
  const auto connected = worker.Connect(std::string(128, 'x'), 0, 2)->Get();
  EXPECT_EQ(connected.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(connected), "NCCL_TOO_OLD");
  EXPECT_NE(worker.AddTrainer(4096, 1), nullptr);
}

ISOLATED_TEST(CudaStart, TakesAMigInstance, With([](MachineDescription* machine) {
                machine->gpus[1].uuid = fakes::MigUuid(5);
              })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(fakes::MigUuid(5));
  EXPECT_TRUE(started.ok()) << started.status();
}

ISOLATED_TEST(CudaStart, RefusesAGpuInExclusiveProcessMode, With([](MachineDescription* machine) {
                machine->gpus[1].mode = fakes::ComputeMode::kExclusiveProcess;
              })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(1));
  EXPECT_EQ(started.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(started), "GPU_EXCLUSIVE");
  EXPECT_THAT(started.status().message(), HasSubstr("start MPS"));
  EXPECT_EQ(worker.machine().Calls("cuDevicePrimaryCtxRetain", worker.process().pid()), 0u);
}

ISOLATED_TEST(CudaStart, TakesAGpuInExclusiveProcessModeUnderMps,
              With([](MachineDescription* machine) {
                machine->gpus[1].mode = fakes::ComputeMode::kExclusiveProcess;
                machine->mps = true;
              })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(1));
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_TRUE(started->started().devices(0).mps());
}

ISOLATED_TEST(CudaStart, RefusesAnOldGpu,
              With([](MachineDescription* machine) { machine->gpus[1].compute_capability = 75; })) {
  CudaWorkerFixture worker;
  const auto started = worker.Start(GpuUuid(1));
  EXPECT_EQ(ReasonOf(started), "GPU_UNSUPPORTED");
  EXPECT_THAT(started.status().message(), HasSubstr("compute capability 8.0"));
}

ISOLATED_TEST(CudaStart, RefusesAGpuWithoutStreamMemoryOperations,
              With([](MachineDescription* machine) {
                machine->gpus[1].stream_memory_operations = false;
              })) {
  CudaWorkerFixture worker;
  EXPECT_EQ(ReasonOf(worker.Start(GpuUuid(1))), "GPU_UNSUPPORTED");
}

ISOLATED_TEST(CudaStart, FallsBackToLegacyIpcAndSaysSo,
              With([](MachineDescription* machine) { machine->gpus[0].posix_handles = false; })) {
  CudaWorkerFixture worker;
  worker.Open();
  worker.AddTrainer(1 << 20, 1);
  const worker::ArenaAdded& added = worker.last_arena_added().arena_added();
  EXPECT_EQ(added.ipc_handle().size(), std::size_t{CU_IPC_HANDLE_SIZE});
  EXPECT_THAT(added.why_legacy(), HasSubstr("file descriptor"));
  EXPECT_EQ(added.bytes(), std::size_t{2} << 20);
}

ISOLATED_TEST(CudaStart, FullGpuIsRefusedWithItsFreeBytes, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const std::size_t before = worker.machine().DeviceBytes(0);
  absl::Status refused;
  EXPECT_EQ(worker.AddTrainer(std::size_t{2} << 30, 1, &refused), nullptr);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, "GPU_OUT_OF_MEMORY");
  EXPECT_THAT(refused.message(), HasSubstr("free of 1073741824"));
  // An arena that fits still works.
  EXPECT_NE(worker.AddTrainer(1 << 20, 1, &refused), nullptr);
  EXPECT_GT(worker.machine().DeviceBytes(0), before);
}

}  // namespace
}  // namespace gradsync::daemon
