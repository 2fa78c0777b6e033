// NCCL: communicators that are polled, collectives that spin, and aborts.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <nccl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync::fakes {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Polls until the communicator is not in progress. ncclInProgress if that takes too long.
ncclResult_t Settle(ncclComm_t communicator) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
    EXPECT_EQ(ncclCommGetAsyncError(communicator, &state), ncclSuccess);
    std::this_thread::yield();
  }
  return state;
}

// One rank with its context, stream, values and communicator.
struct Rank {
  CUcontext context = nullptr;
  ncclComm_t communicator = nullptr;
  CUstream stream = nullptr;
  CUdeviceptr values = 0;

  void Enter() const { CUDA_OK(cuCtxSetCurrent(context)); }

  // Begins to join. Afterwards the communicator is in progress.
  void Join(const ncclUniqueId& id, int rank, int ranks, int device) {
    context = EnterContext(device);
    stream = MakeStream();
    values = MakeFloats(kCount);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    EXPECT_EQ(ncclCommInitRankConfig(&communicator, ranks, id, rank, &config), ncclInProgress);
  }

  ncclResult_t AllReduce() const {
    Enter();
    void* const buffer = reinterpret_cast<void*>(values);
    return ncclAllReduce(buffer, buffer, kCount, ncclFloat32, ncclSum, communicator,
                         reinterpret_cast<cudaStream_t>(stream));
  }

  void Fill(float value) const {
    Enter();
    WriteFloats(values, std::vector<float>(kCount, value), stream);
  }
  std::vector<float> Read() const {
    Enter();
    return ReadFloats(values, kCount, stream);
  }

  static constexpr std::size_t kCount = 1000;
};

ncclUniqueId NewId() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

// Returns `count` ranks of this process that have joined. Rank i is on device i.
std::vector<Rank> JoinedRanks(int count) {
  const ncclUniqueId id = NewId();
  std::vector<Rank> ranks(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) ranks[static_cast<std::size_t>(i)].Join(id, i, count, i);
  for (const Rank& rank : ranks) EXPECT_EQ(Settle(rank.communicator), ncclSuccess);
  return ranks;
}

ISOLATED_TEST(Nccl, SumsOverRanks, MachineWithGpus(3)) {
  const std::vector<Rank> ranks = JoinedRanks(3);
  for (int round = 0; round < 3; ++round) {
    float value = 1;
    for (const Rank& one : ranks) one.Fill(value++);
    for (const Rank& one : ranks) EXPECT_EQ(one.AllReduce(), ncclInProgress);
    for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
    for (const Rank& one : ranks) EXPECT_THAT(one.Read(), Each(6.0f));
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(Nccl, GroupLaunchesAllItsCalls, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  ranks[0].Fill(1);
  ranks[1].Fill(2);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  for (const Rank& one : ranks) {
    EXPECT_EQ(one.AllReduce(), ncclSuccess);
    EXPECT_EQ(one.AllReduce(), ncclSuccess);
  }
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  for (const Rank& one : ranks) EXPECT_THAT(one.Read(), Each(6.0f));
}

// An event that is recorded before the poll does not cover the all-reduce.
ISOLATED_TEST(NcclHazard, KernelReachesTheStreamOnlyByPolling, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  ranks[0].Fill(1);
  ranks[1].Fill(2);
  ranks[0].Enter();
  CUevent too_early = MakeEvent();
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  CUDA_OK(cuEventRecord(too_early, ranks[0].stream));
  EXPECT_EQ(cuEventSynchronize(too_early), CUDA_SUCCESS);
  EXPECT_THAT(ranks[0].Read(), Each(1.0f));  // the all-reduce has not run
  EXPECT_EQ(ranks[1].AllReduce(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_THAT(ranks[0].Read(), Each(3.0f));
}

ISOLATED_TEST(NcclHazard, CallsInProgressAreRefused, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInvalidArgument);
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("before the previous operation"));
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
}

ISOLATED_TEST(NcclHazard, CollectiveSpinsUntilAllRanksHaveLaunched, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  ranks[0].Fill(1);
  ranks[1].Fill(2);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  ranks[1].Enter();
  CUDA_OK(cuStreamSynchronize(ranks[1].stream));
  EXPECT_EQ(cuStreamQuery(ranks[1].stream), CUDA_SUCCESS);
  ranks[0].Enter();
  EXPECT_EQ(cuStreamQuery(ranks[0].stream), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(ranks[1].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[1].communicator), ncclSuccess);
  ranks[0].Enter();
  EXPECT_EQ(cuStreamSynchronize(ranks[0].stream), CUDA_SUCCESS);
}

// Only the stream orders the sums of both ranks.
ISOLATED_TEST(NcclHazard, MissingWaitForTheCollectiveIsARace, MachineWithGpus(2)) {
  SKIP_UNDER_TSAN();
  const std::vector<Rank> ranks = JoinedRanks(2);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  ranks[0].Enter();
  CUstream other = MakeStream();
  CUDA_OK(cuMemsetD32Async(ranks[0].values, 0, 1, other));
  EXPECT_THAT(FakeMachine().Violations(),
              ElementsAre(HasSubstr("cuMemsetD32Async is not ordered after ncclAllReduce")));
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
}

ISOLATED_TEST(NcclHazard, DifferentCountsAreAViolation, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  ranks[1].Enter();
  void* const buffer = reinterpret_cast<void*>(ranks[1].values);
  EXPECT_EQ(ncclAllReduce(buffer, buffer, 1, ncclFloat32, ncclSum, ranks[1].communicator,
                          reinterpret_cast<cudaStream_t>(ranks[1].stream)),
            ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_TRUE(FakeMachine().AwaitJournal(kViolation, "differ in collective 1", kPatienceMs));
  for (const Rank& one : ranks) EXPECT_EQ(ncclCommAbort(one.communicator), ncclSuccess);
}

ISOLATED_TEST(NcclHazard, DifferentGroupsAreAViolation, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ranks[0].AllReduce(), ncclSuccess);
  EXPECT_EQ(ranks[0].AllReduce(), ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
  EXPECT_EQ(ranks[1].AllReduce(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_TRUE(FakeMachine().AwaitJournal(kViolation, "differ in collective 1", kPatienceMs));
  for (const Rank& one : ranks) EXPECT_EQ(ncclCommAbort(one.communicator), ncclSuccess);
}

ISOLATED_TEST(NcclHazard, RegistrationByOnlySomeRanksIsAViolation, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  void* handle = nullptr;
  EXPECT_EQ(ncclCommRegister(ranks[0].communicator, reinterpret_cast<void*>(ranks[0].values),
                             Rank::kCount * sizeof(float), &handle),
            ncclSuccess);
  for (const Rank& one : ranks) EXPECT_EQ(one.AllReduce(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_TRUE(FakeMachine().AwaitJournal(kViolation, "differ in collective 1", kPatienceMs));
  for (const Rank& one : ranks) EXPECT_EQ(ncclCommAbort(one.communicator), ncclSuccess);
}

// NCCL reports no error for different offsets. It only uses a slower algorithm.
ISOLATED_TEST(NcclHazard, DifferentOffsetsInRegisteredMemoryAreAViolation, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  for (int i = 0; i < 2; ++i) {
    ranks[i].Enter();
    constexpr std::size_t kBytes = Rank::kCount * sizeof(float);
    void* memory = nullptr;
    void* handle = nullptr;
    ASSERT_EQ(ncclMemAlloc(&memory, 2 * kBytes), ncclSuccess);
    EXPECT_EQ(ncclCommRegister(ranks[i].communicator, memory, 2 * kBytes, &handle), ncclSuccess);
    void* const buffer = static_cast<char*>(memory) + i * kBytes;
    EXPECT_EQ(ncclAllReduce(buffer, buffer, Rank::kCount, ncclFloat32, ncclSum,
                            ranks[i].communicator, reinterpret_cast<cudaStream_t>(ranks[i].stream)),
              ncclInProgress);
  }
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_TRUE(FakeMachine().AwaitJournal(kViolation, "differ in the offset", kPatienceMs));
}

ISOLATED_TEST(NcclHazard, TwoRanksOnOneGpuAreRefused, MachineWithGpus(1)) {
  const ncclUniqueId id = NewId();
  Rank first, second;
  first.Join(id, 0, 2, 0);
  second.Join(id, 1, 2, 0);
  EXPECT_EQ(Settle(first.communicator), ncclInvalidUsage);
  EXPECT_EQ(Settle(second.communicator), ncclInvalidUsage);
  EXPECT_EQ(ncclCommAbort(first.communicator), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(second.communicator), ncclSuccess);
}

// CUDA loads a kernel at its first launch, and loading waits for spinning kernels. If the
// collective needs work that follows that launch, both wait for ever.
ISOLATED_TEST(NcclHazard, LoadingAKernelWaitsForSpinningCollectives, MachineWithGpus(2)) {
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  ranks[0].Enter();
  const std::uint32_t image[4] = {0xBA55ED50};
  CUmodule module = nullptr;
  CUfunction late = nullptr, early = nullptr;
  CUDA_OK(cuModuleLoadData(&module, image));
  CUDA_OK(cuModuleGetFunction(&late, module, "gradsync_combine_f32_f32"));
  CUDA_OK(cuModuleGetFunction(&early, module, "gradsync_combine_f64_f64"));
  CUDA_OK(cuFuncLoad(early));
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  CUDA_OK(cuFuncLoad(early));
  std::future<CUresult> load = std::async(std::launch::async, [&] {
    ranks[0].Enter();
    return cuFuncLoad(late);
  });
  EXPECT_TRUE(machine.AwaitJournal(
      kBlocked, "cuFuncLoad of gradsync_combine_f32_f32 behind a spinning collective",
      kPatienceMs));
  EXPECT_EQ(ranks[1].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[1].communicator), ncclSuccess);
  EXPECT_EQ(load.get(), CUDA_SUCCESS);
}

// NCCL connects at the first collective, and takes the memory for the connections then.
ISOLATED_TEST(NcclHazard, FirstCollectiveTakesMemory, MachineWithGpus(2)) {
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  const std::size_t joined = machine.DeviceBytes(0);
  for (int round = 0; round < 2; ++round) {
    for (const Rank& one : ranks) EXPECT_EQ(one.AllReduce(), ncclInProgress);
    for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
    EXPECT_EQ(machine.DeviceBytes(0), joined + MachineDescription().connection_bytes);
  }
}

ISOLATED_TEST(NcclHazard, RuntimeConnectOfZeroConnectsAtOnce, MachineWithGpus(2)) {
  setenv("NCCL_RUNTIME_CONNECT", "0", 1);
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  const std::size_t joined = machine.DeviceBytes(0);
  unsetenv("NCCL_RUNTIME_CONNECT");
  for (const Rank& one : ranks) EXPECT_EQ(one.AllReduce(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  EXPECT_EQ(machine.DeviceBytes(0), joined);
}

ISOLATED_TEST(NcclHazard, FirstCollectiveMayLackMemory, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  ranks[0].Enter();
  std::size_t free = 0, total = 0;
  CUDA_OK(cuMemGetInfo(&free, &total));
  MakeMapped(free - 2 * kMebibyte);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclUnhandledCudaError);
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
}

// ---- abort ----

ISOLATED_TEST(NcclAbort, EndsASpinningCollectiveAndFreesItsMemory, MachineWithGpus(2)) {
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  const std::size_t with_communicator = machine.DeviceBytes(0);
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
  ranks[0].Enter();
  EXPECT_EQ(cuStreamSynchronize(ranks[0].stream), CUDA_SUCCESS);
  EXPECT_EQ(machine.DeviceBytes(0), with_communicator - MachineDescription().communicator_bytes);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(ranks[0].communicator, &state), ncclInvalidArgument);
}

ISOLATED_TEST(NcclAbort, EndsConnecting, MachineWithGpus(1)) {
  Rank alone;
  alone.Join(NewId(), 0, 2, 0);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(alone.communicator, &state), ncclSuccess);
  EXPECT_EQ(state, ncclInProgress);
  EXPECT_EQ(ncclCommAbort(alone.communicator), ncclSuccess);
}

ISOLATED_TEST(NcclAbort, HangsBehindAParkedWaitUntilItsRelease, MachineWithGpus(2)) {
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  for (const Rank& one : ranks) EXPECT_EQ(one.AllReduce(), ncclInProgress);
  for (const Rank& one : ranks) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  ranks[0].Enter();
  CUDA_OK(cuStreamSynchronize(ranks[0].stream));
  Word word;
  CUDA_OK(cuStreamWaitValue64(ranks[0].stream, word.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  std::future<ncclResult_t> abort =
      std::async(std::launch::async, [&] { return ncclCommAbort(ranks[0].communicator); });
  EXPECT_TRUE(machine.AwaitJournal(kBlocked, "ncclCommAbort behind a parked stream", kPatienceMs));
  EXPECT_NE(abort.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  word.Store(1);
  EXPECT_EQ(abort.get(), ncclSuccess);
}

// Two communicators share a stream. Freeing one of them waits for the kernel of the other one,
// unless both are flagged first.
ISOLATED_TEST(NcclAbort, AllAreFlaggedBeforeAnyIsFreed, MachineWithGpus(2)) {
  const std::vector<Rank> ranks = JoinedRanks(2);
  const ncclUniqueId id = NewId();
  std::vector<Rank> again(2);
  for (int i = 0; i < 2; ++i) again[static_cast<std::size_t>(i)].Join(id, i, 2, i);
  for (const Rank& one : again) EXPECT_EQ(Settle(one.communicator), ncclSuccess);
  again[0].stream = ranks[0].stream;
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclSuccess);
  EXPECT_EQ(again[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(again[0].communicator), ncclSuccess);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(again[0].communicator), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
}

// ---- errors ----

ISOLATED_TEST(NcclError, PollingReturnsAsynchronousErrors, MachineWithGpus(2)) {
  FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(2);
  machine.Inject("ncclAllReduce 1 async 6");
  EXPECT_EQ(ranks[0].AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(ranks[0].communicator), ncclRemoteError);
  EXPECT_EQ(ranks[0].AllReduce(), ncclRemoteError);
  EXPECT_EQ(ncclCommAbort(ranks[0].communicator), ncclSuccess);
}

ISOLATED_TEST(NcclError, InjectedErrorHasItsText, MachineWithGpus(1)) {
  FakeMachine machine;
  EnterContext();
  machine.Inject("ncclGetUniqueId 1 error 2");
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSystemError);
  EXPECT_THAT(ncclGetLastError(nullptr), HasSubstr("injected at ncclGetUniqueId"));
}

ISOLATED_TEST(NcclError, CommunicatorNeedsAContextAndMemory, MachineWithGpus(1)) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t communicator = nullptr;
  EXPECT_EQ(ncclCommInitRankConfig(&communicator, 1, NewId(), 0, &config), ncclUnhandledCudaError);
  EnterContext();
  ncclConfig_t garbage{};
  EXPECT_EQ(ncclCommInitRankConfig(&communicator, 1, NewId(), 0, &garbage), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRankConfig(&communicator, 1, ncclUniqueId{}, 0, &config),
            ncclInvalidArgument);
  std::size_t free = 0, total = 0;
  CUDA_OK(cuMemGetInfo(&free, &total));
  const CUmemAllocationProp properties = ExportableOn(0);
  CUmemGenericAllocationHandle rest = 0;
  CUDA_OK(cuMemCreate(&rest, free, &properties, 0));
  EXPECT_EQ(ncclCommInitRankConfig(&communicator, 1, NewId(), 0, &config), ncclUnhandledCudaError);
}

ISOLATED_TEST(NcclMemory, IsDeviceMemory, MachineWithGpus(1)) {
  const FakeMachine machine;
  EnterContext();
  const std::size_t before = machine.DeviceBytes(0);
  void* memory = nullptr;
  ASSERT_EQ(ncclMemAlloc(&memory, 1000), ncclSuccess);
  EXPECT_EQ(machine.DeviceBytes(0), before + 2 * kMebibyte);
  CUstream stream = MakeStream();
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  WriteFloats(address, {1, 2}, stream);
  EXPECT_THAT(ReadFloats(address, 2, stream), ElementsAre(1.0f, 2.0f));
  EXPECT_EQ(ncclMemFree(memory), ncclSuccess);
  EXPECT_EQ(machine.DeviceBytes(0), before);
  EXPECT_EQ(ncclMemFree(memory), ncclInvalidArgument);
}

ISOLATED_TEST(NcclMemory, IsDeregisteredBeforeItIsFreed, MachineWithGpus(1)) {
  const FakeMachine machine;
  const std::vector<Rank> ranks = JoinedRanks(1);
  void* memory[2];
  void* handle = nullptr;
  for (void*& piece : memory) {
    ASSERT_EQ(ncclMemAlloc(&piece, 1000), ncclSuccess);
    EXPECT_EQ(ncclCommRegister(ranks[0].communicator, piece, 1000, &handle), ncclSuccess);
  }
  EXPECT_EQ(ncclCommDeregister(ranks[0].communicator, handle), ncclSuccess);
  EXPECT_EQ(ncclMemFree(memory[1]), ncclSuccess);
  EXPECT_THAT(machine.Violations(), IsEmpty());
  EXPECT_EQ(ncclMemFree(memory[0]), ncclSuccess);
  EXPECT_THAT(machine.Violations(), ElementsAre("ncclMemFree of memory that is registered"));
}

// ---- between processes ----

ncclUniqueId IdFrom(int fd) {
  ncclUniqueId id{};
  EXPECT_EQ(read(fd, &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  return id;
}

// Rank 1 of 2, on device 1. It ends in an orderly way.
ROLE(second_rank) {
  Rank rank;
  rank.Join(IdFrom(3), 1, 2, 1);
  if (Settle(rank.communicator) != ncclSuccess) return 1;
  rank.Fill(2);
  rank.AllReduce();
  if (Settle(rank.communicator) != ncclSuccess || rank.Read()[7] != 3.0f) return 1;
  if (ncclCommFinalize(rank.communicator) != ncclInProgress) return 1;
  if (Settle(rank.communicator) != ncclSuccess) return 1;
  return ncclCommDestroy(rank.communicator) == ncclSuccess ? 0 : 1;
}

struct Pipe {
  Pipe() {
    int fds[2] = {-1, -1};
    if (pipe2(fds, O_CLOEXEC) != 0) std::abort();
    out = Descriptor(fds[0]);
    in = Descriptor(fds[1]);
  }
  Descriptor out, in;
};

void AverageWithAnotherProcess(const std::vector<std::string>& environment) {
  FakeMachine machine;
  const Pipe pipe;
  const auto other = StartRole("second_rank", {pipe.out.get()}, environment);
  const ncclUniqueId id = NewId();
  ASSERT_EQ(write(pipe.in.get(), &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  Rank rank;
  rank.Join(id, 0, 2, 0);
  ASSERT_EQ(Settle(rank.communicator), ncclSuccess);
  rank.Fill(1);
  EXPECT_EQ(rank.AllReduce(), ncclInProgress);
  ASSERT_EQ(Settle(rank.communicator), ncclSuccess);
  EXPECT_THAT(rank.Read(), Each(3.0f));
  EXPECT_EQ(ncclCommFinalize(rank.communicator), ncclInProgress);
  EXPECT_EQ(Settle(rank.communicator), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(rank.communicator), ncclSuccess);
  EXPECT_TRUE(Succeeds(*other));
  EXPECT_EQ(machine.Calls("ncclCommInitRankConfig"), 2u);
  EXPECT_THAT(machine.Violations(), IsEmpty());
  EXPECT_EQ(machine.DeviceBytes(1), 0u);
}

ISOLATED_TEST(NcclProcesses, ProcessesReduceAndEnd, MachineWithGpus(2)) {
  AverageWithAnotherProcess({});
}

ISOLATED_TEST(NcclProcesses, TwoRanksOnOneGpuAreTakenIfTheirHostIdsDiffer, MachineWithGpus(1)) {
  AverageWithAnotherProcess({"NCCL_HOSTID=another"});
}

// Joins, and then waits until it is killed.
ROLE(idle_rank) {
  Rank rank;
  rank.Join(IdFrom(3), 1, 2, 1);
  if (Settle(rank.communicator) != ncclSuccess) return 1;
  char byte = 0;
  if (write(4, &byte, 1) != 1) return 1;
  for (;;) pause();
}

MachineDescription ReportingDeath() {
  MachineDescription machine = MachineWithGpus(2);
  machine.nccl_reports_lost_ranks = true;
  return machine;
}

// Rank 0 of a communicator whose rank 1 is killed.
Rank BesideAKilledRank() {
  const Pipe pipe, joined;
  const auto other = StartRole("idle_rank", {pipe.out.get(), joined.in.get()});
  const ncclUniqueId id = NewId();
  EXPECT_EQ(write(pipe.in.get(), &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  Rank rank;
  rank.Join(id, 0, 2, 0);
  EXPECT_EQ(Settle(rank.communicator), ncclSuccess);
  EXPECT_TRUE(AwaitReadable(joined.out.get(), kPatienceMs));
  other->Kill();
  return rank;
}

ISOLATED_TEST(NcclProcesses, LostRankLeavesTheOthersSpinning, MachineWithGpus(2)) {
  const Rank rank = BesideAKilledRank();
  EXPECT_EQ(rank.AllReduce(), ncclInProgress);
  EXPECT_EQ(Settle(rank.communicator), ncclSuccess);
  rank.Enter();
  EXPECT_EQ(cuStreamQuery(rank.stream), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
  EXPECT_EQ(FakeMachine().DeviceBytes(1), 0u);
}

ISOLATED_TEST(NcclProcesses, LostRankMayBeReported, ReportingDeath()) {
  const Rank rank = BesideAKilledRank();
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(rank.communicator, &state), ncclSuccess);
  EXPECT_EQ(state, ncclRemoteError);
  EXPECT_EQ(ncclCommAbort(rank.communicator), ncclSuccess);
}

}  // namespace
}  // namespace gradsync::fakes
