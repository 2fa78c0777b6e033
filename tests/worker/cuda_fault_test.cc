// Failures of GPUs, workers and trainers.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/error.h"
#include "tests/worker/cuda_worker_fixture.h"

namespace gradsync::daemon {
namespace {

using fakes::MachineWithGpus;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::size_t kCount = 1024;
constexpr std::size_t kBytes = kCount * sizeof(float);

std::string ForWorker(CudaWorkerFixture& worker, const std::string& rule) {
  return rule + " pid=" + std::to_string(worker.process().pid());
}

ISOLATED_TEST(CudaFault, StickyErrorEndsTheWorkerAndIsNamed, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  worker.machine().Inject(ForWorker(worker, "cuLaunchKernel 1 sticky 700"));
  trainer->WriteReady(0, 1);
  const auto done = worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount));
  for (const absl::Status& why : {done->Get().status(), worker.Ended()}) {
    EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
    EXPECT_THAT(why.message(), HasSubstr("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"));
  }
}

// CUDA gives these errors if driver files are missing or inaccessible, or if MPS does not answer.
ISOLATED_TEST(CudaFault, UnusableGpuIsRefusedWithARemedy, MachineWithGpus(1)) {
  for (const CUresult error : {CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_UNKNOWN,
                               CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_MPS_RPC_FAILURE}) {
    CudaWorkerFixture worker;
    worker.machine().Inject(ForWorker(worker, "cuInit 1 error " + std::to_string(error)));
    const absl::Status refused = worker.Start(fakes::GpuUuid(0)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_EQ(DetailsOf(refused).reason, "GPU_UNUSABLE") << refused;
    EXPECT_THAT(refused.message(), HasSubstr("DeviceAllow=")) << refused;
  }
  CudaWorkerFixture worker;
  worker.machine().Inject(
      ForWorker(worker, "cuInit 1 error 808"));  // CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
  EXPECT_EQ(DetailsOf(worker.Start(fakes::GpuUuid(0)).status()).reason, "MPS_FULL");
}

fakes::MachineDescription WithMps() {
  fakes::MachineDescription machine = MachineWithGpus(1);
  machine.mps = true;
  return machine;
}

// Causes the error that a kernel with a wild pointer causes in a trainer.
void Fault() {
  CUstream stream = fakes::MakeStream();
  CUDA_OK(cuMemsetD8Async(0x1000, 0, 1, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
}

// The worker must end, since MPS accepts no new client while the worker's context exists.
ISOLATED_TEST(CudaFault, IdleWorkerEndsAfterItsTrainersFault, WithMps()) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  Fault();
  const auto removed = worker.Remove(*trainer);
  for (const absl::Status& why : {removed->Get().status(), worker.Ended()}) {
    EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
    EXPECT_THAT(why.message(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  }
}

ISOLATED_TEST(CudaFault, AddArenaEndsAWorkerWhoseGpuHasFailed, WithMps()) {
  CudaWorkerFixture worker;
  worker.Open();
  Fault();
  absl::Status refused;
  EXPECT_EQ(worker.AddTrainer(kBytes, 1, &refused), nullptr);
  for (const absl::Status& why : {refused, worker.Ended()}) {
    EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
    EXPECT_THAT(why.message(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  }
}

ISOLATED_TEST(CudaFault, MemoryPingEndsAWorkerWhoseGpuHasFailed, WithMps()) {
  CudaWorkerFixture worker;
  worker.Open();
  Fault();
  worker::Call ping;
  ping.mutable_ping()->set_memory(true);
  EXPECT_FALSE(worker.Call(std::move(ping)).ok());
  EXPECT_THAT(worker.Ended().message(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
}

ISOLATED_TEST(CudaFault, PingEndsAWorkerWhoseGpuHasFailed, WithMps()) {
  CudaWorkerFixture worker;
  worker.Open();
  Fault();
  worker::Call ping;
  ping.mutable_ping();
  EXPECT_FALSE(worker.Call(std::move(ping)).ok());
  EXPECT_THAT(worker.Ended().message(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
}

ISOLATED_TEST(CudaFault, StreamQueryTellsBusyIdleAndFailedGpusApart, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  worker.machine().Inject(ForWorker(worker, "cuStreamQuery 1 error 600"));  // NOT_READY
  worker.Ping();
  worker.machine().ClearFaults();
  worker.machine().Inject(ForWorker(worker, "cuStreamQuery 1 error 999"));
  worker::Call ping;
  ping.mutable_ping();
  EXPECT_FALSE(worker.Call(std::move(ping)).ok());
  EXPECT_THAT(worker.Ended().message(), HasSubstr("CUDA_ERROR_UNKNOWN"));
}

// cuMemGetInfo can take minutes while another process pins much host memory.
ISOLATED_TEST(CudaFault, PingDoesNotQueryMemory, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  worker.machine().Inject(ForWorker(worker, "cuMemGetInfo_v2 1+ hang"));
  for (int i = 0; i < 3; ++i) worker.Ping();
  worker::Call ping;
  ping.mutable_ping()->set_memory(true);
  const auto memory = worker.Send(std::move(ping));
  EXPECT_FALSE(memory->ComesWithin(std::chrono::milliseconds(50)));
  worker.machine().ClearFaults();
  const auto told = memory->Get();
  ASSERT_TRUE(told.ok()) << told.status();
  EXPECT_GT(told->pong().total_bytes(), 0u);
}

ISOLATED_TEST(CudaFault, HangingDriverCallEndsTheWorker, MachineWithGpus(1)) {
  WorkerProcessOptions options;
  options.ping_interval = absl::Milliseconds(50);
  options.hang_limit = absl::Milliseconds(500);
  CudaWorkerFixture worker(options);
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  worker.machine().Inject(ForWorker(worker, "cuLaunchKernel 1 hang"));
  trainer->WriteReady(0, 1);
  const auto done = worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount));
  EXPECT_THAT(done->Get().status().message(), HasSubstr("gave no sign of life"));
}

ISOLATED_TEST(CudaFault, KilledWorkerReleasesItsTrainer, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  const auto absent = worker.AddTrainer(kBytes, 1);
  trainer->MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  trainer->WaitDone(0, 1);
  const auto done =
      worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get(), absent.get()}, 1, kCount));
  worker.Ping();
  kill(worker.process().pid(), SIGKILL);
  EXPECT_THAT(worker.Ended().message(), HasSubstr("killed by signal 9"));
  EXPECT_EQ(DetailsOf(done->Get().status()).reason, "WORKER_LOST");
  trainer->Poison(0, 1);  // as a client does when its daemon is lost
  EXPECT_TRUE(trainer->Released());
  // The mapping outlives the worker.
  EXPECT_EQ(trainer->Floats(0, kCount)[0], 1.0f);
}

ISOLATED_TEST(CudaFault, WorkerStopsWithoutATrainersReadyWord, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  const auto done = worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount));
  worker.Ping();
  worker.Stop();
  EXPECT_EQ(done->Get().status().code(), absl::StatusCode::kCancelled);
}

fakes::MachineDescription WithoutDescriptors() {
  fakes::MachineDescription machine = MachineWithGpus(1);
  machine.gpus[0].posix_handles = false;
  return machine;
}

// Receives a handle, opens it, reports that, and lives until it is killed.
ROLE(ipc_trainer) {
  constexpr int kSocket = 3;
  CUipcMemHandle handle{};
  CUdeviceptr address = 0;
  fakes::EnterContext();
  if (read(kSocket, &handle, sizeof(handle)) != sizeof(handle)) return 1;
  CUDA_OK(cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  char byte = 0;
  if (write(kSocket, &byte, 1) != 1) return 1;
  return static_cast<int>(read(kSocket, &byte, 1));
}

// If the worker frees it earlier, the behaviour is undefined.
ISOLATED_TEST(CudaFault, LegacyMemoryIsKeptUntilTheTrainerEnds, WithoutDescriptors()) {
  CudaWorkerFixture worker;
  worker.Open();
  worker.AddTrainer(kBytes, 1);  // makes the staging memory too
  const std::size_t before = worker.machine().DeviceBytes(0);
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
  const UniqueFd mine(sockets[0]);
  const UniqueFd theirs(sockets[1]);
  const auto trainer = fakes::StartRole("ipc_trainer", {theirs.get()});
  worker.set_trainer_process(trainer->pid());
  worker.AddTrainer(kBytes, 1);
  const std::string handle = worker.last_arena_added().arena_added().ipc_handle();
  ASSERT_EQ(write(mine.get(), handle.data(), handle.size()), CU_IPC_HANDLE_SIZE);
  char byte = 0;
  ASSERT_EQ(read(mine.get(), &byte, 1), 1);

  const auto removed = worker.Remove(worker.last_arena());
  for (int i = 0; i < 10; ++i) worker.Ping();
  EXPECT_FALSE(removed->ComesWithin(std::chrono::milliseconds(0)));
  trainer->Kill();
  EXPECT_TRUE(removed->Get().ok());
  EXPECT_EQ(worker.machine().DeviceBytes(0), before);
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaFault, FailedAllocationLeavesNothingBehind, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  ASSERT_NE(worker.AddTrainer(kBytes, 1), nullptr);  // makes the staging memory too
  const std::size_t before = worker.machine().DeviceBytes(0);
  for (const char* call :
       {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
        "cuMemExportToShareableHandle", "cuMemHostRegister_v2", "cuMemsetD8Async"}) {
    worker.machine().Inject(ForWorker(worker, std::string(call) + " 1 error 999"));
    absl::Status refused;
    EXPECT_EQ(worker.AddTrainer(kBytes, 1, &refused), nullptr) << call;
    EXPECT_THAT(refused.message(), HasSubstr("CUDA_ERROR_UNKNOWN")) << call;
    EXPECT_EQ(worker.machine().DeviceBytes(0), before) << call;
    worker.machine().ClearFaults();
  }
}

}  // namespace
}  // namespace gradsync::daemon
