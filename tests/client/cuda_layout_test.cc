// Layouts on a GPU, against fakes of the driver: a scripted daemon and a worker of its own process
// stand in for gradsyncd.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/include/gradsync/client.h"
#include "tests/client/cuda_worker_role.h"
#include "tests/client/scripted_daemon.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

using fakes::FakeMachine;
using fakes::GpuUuid;
using fakes::MachineWithGpus;
using fakes::MakeStream;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::size_t kCount = 256;  // floats of a bucket
constexpr std::size_t kBuckets = 2;
constexpr std::size_t kVerdictOffset = kBuckets * kCount * sizeof(float);
constexpr char kNonce[] = "a layout's nonce";
constexpr absl::Duration kPatience = absl::Milliseconds(kPatienceMs);

constexpr std::size_t OffsetOf(std::size_t bucket) { return bucket * kCount * sizeof(float); }
constexpr std::size_t VerdictOf(std::uint64_t step) {
  return kVerdictOffset + step % 2 * sizeof(float);
}
CUdeviceptr AddressOf(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

// Parameter i is in bucket i.
LayoutSpec SpecOn(const std::string& device) {
  LayoutSpec spec;
  spec.device = device;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    spec.parameters.push_back({"parameter" + std::to_string(i), {kCount}, DataType::kFloat32});
  }
  return spec;
}

// One rank with a layout on the machine's GPU, the only session of its process.
struct Trainer {
  explicit Trainer(CudaWorkerRole::Memory memory = CudaWorkerRole::Memory::kVmm)
      : worker(memory, kBuckets) {
    fakes::EnterContext();
    stream = MakeStream();
    SessionOptions options;
    options.socket = daemon.socket();
    options.job_id = "job";
    auto joined = Session::Join(options);
    EXPECT_TRUE(joined.ok()) << joined.status();
    session = *std::move(joined);
    auto registering = std::async(std::launch::async,
                                  [this] { return session->RegisterLayout(SpecOn(GpuUuid(0))); });
    const auto registration = daemon.Next();
    if (!registration.has_value()) {
      ADD_FAILURE() << registering.get().status();
      return;
    }
    EXPECT_EQ(registration->register_layout().device(), GpuUuid(0));
    daemon.Offer(kNonce, worker.descriptors());
    v1::SessionResponse response;
    v1::LayoutAssigned& assigned = *response.mutable_layout_assigned();
    assigned.set_request_id(registration->register_layout().request_id());
    assigned.set_channel(1);
    assigned.set_nonce(kNonce);
    assigned.set_arena_bytes(kRoleArenaBytes);
    assigned.set_verdict_offset(kVerdictOffset);
    assigned.set_memory(memory == CudaWorkerRole::Memory::kIpc ? v1::ARENA_MEMORY_CUDA_IPC
                                                               : v1::ARENA_MEMORY_CUDA_VMM);
    assigned.set_ipc_handle(worker.ipc_handle());
    for (std::uint32_t i = 0; i < kBuckets; ++i) {
      v1::Bucket& bucket = *assigned.add_buckets();
      bucket.set_dtype(v1::DATA_TYPE_FLOAT32);
      bucket.set_count(kCount);
      bucket.set_offset(OffsetOf(i));
      v1::Placement& placement = *assigned.add_placements();
      placement.set_bucket(i);
      placement.set_offset(OffsetOf(i));
    }
    daemon.Say(response);
    const auto mapped = daemon.Next();
    EXPECT_TRUE(mapped.has_value() && mapped->has_arena_mapped());
    v1::LayoutReady& ready = *response.mutable_layout_ready();
    ready.set_channel(1);
    ready.set_first_step(1);
    daemon.Say(response);
    auto registered = registering.get();
    EXPECT_TRUE(registered.ok()) << registered.status();
    layout = *std::move(registered);
  }

  // Sends the step's StepDone.
  void Decide(std::uint64_t step, v1::Verdict verdict) {
    v1::SessionResponse response;
    response.mutable_step_done()->set_channel(1);
    response.mutable_step_done()->set_step(step);
    response.mutable_step_done()->set_verdict(verdict);
    daemon.Say(response);
  }

  // Enqueues kernels that write the gradients of a bucket.
  void Write(std::size_t bucket, float value, CUstream on) {
    std::uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    CUDA_OK(cuMemsetD32Async(AddressOf(layout->bucket(bucket).data), bits, kCount, on));
  }

  // The first float of a bucket, after everything on the stream.
  float Read(std::size_t bucket) {
    return fakes::ReadFloats(AddressOf(layout->bucket(bucket).data), 1, stream)[0];
  }
  float ReadVerdict(std::uint64_t step) {
    return fakes::ReadFloats(AddressOf(layout->device_verdict(step)), 1, stream)[0];
  }

  // A reduction whose result is `value` everywhere.
  void Reduce(std::uint64_t step, float value) {
    for (std::size_t i = 0; i < kBuckets; ++i) {
      worker.Fill(OffsetOf(i), value, kCount);
      if (i == kBuckets - 1) worker.Fill(VerdictOf(step), 0, 1);
      worker.WriteDone(i, step);
    }
  }

  ScriptedDaemon daemon;
  CudaWorkerRole worker;
  CUstream stream = nullptr;
  std::unique_ptr<Session> session;
  std::unique_ptr<Layout> layout;
};

std::string ReasonOf(const absl::Status& status) { return ErrorReason(status); }

ISOLATED_TEST(CudaHandoff, ReadyFollowsTheGradients, MachineWithGpus(1)) {
  Trainer trainer;
  for (std::uint64_t step = 1; step <= 10; ++step) {
    for (std::size_t i = 0; i < kBuckets; ++i) {
      trainer.Write(i, static_cast<float>(10 * step + i), trainer.stream);
      const absl::Status marked = trainer.layout->MarkReady(step, i, {trainer.stream});
      ASSERT_TRUE(marked.ok()) << marked;
      const auto message = trainer.daemon.Next();
      ASSERT_TRUE(message.has_value() && message->has_bucket_ready());
      EXPECT_EQ(message->bucket_ready().step(), step);
      ASSERT_TRUE(trainer.worker.AwaitReady(i, step));
      EXPECT_EQ(trainer.worker.Read(OffsetOf(i)), static_cast<float>(10 * step + i));
    }
    ASSERT_TRUE(trainer.layout->EndStep(step).ok());
    ASSERT_TRUE(trainer.daemon.Next()->has_end_step());
    trainer.Reduce(step, 0.5);
    ASSERT_TRUE(trainer.layout->WaitOnStream(step, trainer.stream).ok());
    EXPECT_EQ(trainer.Read(0), 0.5);
    trainer.Decide(step, v1::VERDICT_COMPLETE);
    const auto result = trainer.layout->WaitStep(step, kPatience);
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
  const FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuStreamSynchronize", getpid()), 0u);
    EXPECT_EQ(machine.Calls("cuCtxSynchronize", getpid()), 0u);
  }
}

ISOLATED_TEST(CudaHandoff, StreamsAreJoinedBeforeReady, MachineWithGpus(1)) {
  Trainer trainer;
  CUstream other = MakeStream(), third = MakeStream();
  for (int i = 0; i < 20; ++i) {
    CUDA_OK(cuMemsetD32Async(AddressOf(trainer.layout->bucket(0).data), 0, kCount, other));
  }
  const CUdeviceptr half = AddressOf(trainer.layout->bucket(0).data) + kCount / 2 * sizeof(float);
  CUDA_OK(cuMemsetD32Async(half - kCount / 2 * sizeof(float), 0x40000000, kCount / 2, other));
  CUDA_OK(cuMemsetD32Async(half, 0x3F800000, kCount / 2, other));
  trainer.Write(1, 4, third);
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream, other, third}).ok());
  const auto message = trainer.daemon.Next();
  ASSERT_TRUE(message.has_value() && message->has_end_step());
  EXPECT_TRUE(message->end_step().ready_rest());
  for (std::size_t i = 0; i < kBuckets; ++i) ASSERT_TRUE(trainer.worker.AwaitReady(i, 1));
  EXPECT_EQ(trainer.worker.Read(OffsetOf(0)), 2);
  EXPECT_EQ(trainer.worker.Read(OffsetOf(0) + kCount / 2 * sizeof(float)), 1);
  EXPECT_EQ(trainer.worker.Read(OffsetOf(1)), 4);
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaHandoff, WaitMayComeBeforeOrAfterTheSignal, MachineWithGpus(1)) {
  Trainer trainer;
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.layout->WaitOnStream(1, 0, trainer.stream).ok());
  EXPECT_EQ(cuStreamQuery(trainer.stream), CUDA_ERROR_NOT_READY);
  ASSERT_TRUE(trainer.worker.AwaitReady(0, 1));
  trainer.worker.Fill(OffsetOf(0), 3, kCount);
  trainer.worker.WriteDone(0, 1);
  EXPECT_EQ(trainer.Read(0), 3);

  ASSERT_TRUE(trainer.worker.AwaitReady(1, 1));
  trainer.worker.Fill(OffsetOf(1), 5, kCount);
  trainer.worker.WriteDone(1, 1);
  const absl::Status done = trainer.layout->WaitBucket(1, 1, kPatience);  // by the host
  ASSERT_TRUE(done.ok()) << done;
  ASSERT_TRUE(trainer.layout->WaitOnStream(1, 1, trainer.stream).ok());
  EXPECT_EQ(trainer.Read(1), 5);
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaHandoff, VerdictIsVoidUntilTheStepIsComplete, MachineWithGpus(1)) {
  Trainer trainer;
  for (std::uint64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(trainer.layout->MarkReady(step, 0, {trainer.stream}).ok());
    EXPECT_EQ(trainer.ReadVerdict(step), 1);
    ASSERT_TRUE(trainer.layout->FinishStep(step, {}, {trainer.stream}).ok());
    ASSERT_TRUE(trainer.worker.AwaitReady(1, step));
    trainer.Reduce(step, 2);
    ASSERT_TRUE(trainer.layout->WaitOnStream(step, trainer.stream).ok());
    EXPECT_EQ(trainer.ReadVerdict(step), 0);
    trainer.Decide(step, v1::VERDICT_COMPLETE);
    ASSERT_TRUE(trainer.layout->WaitStep(step, kPatience).ok());
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaHandoff, SessionEndReleasesStreamsAsVoid, MachineWithGpus(1)) {
  Trainer trainer;
  CUstream optimizer = MakeStream();
  for (std::uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(trainer.layout->FinishStep(step, {}, {trainer.stream}).ok());
    ASSERT_TRUE(trainer.layout->WaitOnStream(step, optimizer).ok());
  }
  // The first step has one of its two buckets.
  trainer.worker.WriteDone(0, 1);
  trainer.worker.Kill();
  EXPECT_EQ(cuStreamQuery(optimizer), CUDA_ERROR_NOT_READY);
  trainer.daemon.Die();
  CUDA_OK(cuStreamSynchronize(optimizer));
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const CUdeviceptr verdict = AddressOf(trainer.layout->device_verdict(step));
    EXPECT_THAT(fakes::ReadFloats(verdict, 1, optimizer), ElementsAre(1));
    const auto result = trainer.layout->WaitStep(step, kPatience);
    EXPECT_EQ(ReasonOf(result.status()), "STEP_IN_DOUBT") << result.status();
  }
  EXPECT_EQ(trainer.layout->WaitOnStream(2, optimizer).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(trainer.layout->MarkReady(3, 0, {optimizer}).code(), absl::StatusCode::kUnavailable);
  trainer.layout.reset();
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
  EXPECT_THAT(FakeMachine().Journal(fakes::kBlocked), IsEmpty());
}

// A device verdict needs no EndStep, and other ranks may have read it.
ISOLATED_TEST(CudaHandoff, MarkedStepIsInDoubtWithoutEndStep, MachineWithGpus(1)) {
  for (const bool all : {true, false}) {
    Trainer trainer;
    for (std::size_t i = all ? 0 : 1; i < kBuckets; ++i) {
      ASSERT_TRUE(trainer.layout->MarkReady(1, i, {trainer.stream}).ok());
    }
    if (all) {
      ASSERT_TRUE(trainer.layout->WaitOnStream(1, trainer.stream).ok());
      ASSERT_TRUE(trainer.worker.AwaitReady(kBuckets - 1, 1));
      trainer.Reduce(1, 2);
    }
    EXPECT_EQ(trainer.ReadVerdict(1), all ? 0 : 1);
    trainer.daemon.Die();
    const absl::Status end = trainer.layout->WaitStep(1, kPatience).status();
    EXPECT_EQ(ReasonOf(end), all ? "STEP_IN_DOUBT" : "DAEMON_LOST") << end;
  }
}

ISOLATED_TEST(CudaHandoff, StepNumberAfterPoisonParksNoStream, MachineWithGpus(1)) {
  fakes::EnterContext();
  fakes::Word busy;
  Trainer trainer;
  CUstream optimizer = MakeStream();
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.layout->WaitOnStream(1, optimizer).ok());
  ASSERT_TRUE(trainer.layout->FinishStep(2, {}, {trainer.stream}).ok());
  CUDA_OK(cuStreamWaitValue64(optimizer, busy.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  ASSERT_TRUE(trainer.layout->WaitOnStream(2, optimizer).ok());
  trainer.daemon.Die();
  EXPECT_FALSE(trainer.layout->WaitStep(2, kPatience).ok());
  // The first step's averages were being written back when the daemon was lost.
  for (std::size_t i = 0; i < kBuckets; ++i) trainer.worker.semaphore(i).done.store(1);
  busy.Store(1);
  const absl::Time end = absl::Now() + kPatience;
  while (cuStreamQuery(optimizer) == CUDA_ERROR_NOT_READY && absl::Now() < end) sched_yield();
  EXPECT_EQ(cuStreamQuery(optimizer), CUDA_SUCCESS);
  for (std::size_t i = 0; i < kBuckets; ++i) trainer.worker.semaphore(i).done.store(2);
  trainer.layout.reset();
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

// Otherwise the stream would read the verdict of two steps before.
ISOLATED_TEST(CudaHandoff, ReleasedStreamDoesNotOvertakeTheMark, MachineWithGpus(1)) {
  fakes::EnterContext();
  fakes::Word busy;
  CUstream optimizer = MakeStream(), other = MakeStream();
  const CUdeviceptr scratch = fakes::MakeFloats(1);
  Trainer trainer;
  CUDA_OK(cuStreamWaitValue64(trainer.stream, busy.address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.layout->WaitOnStream(1, optimizer).ok());
  trainer.daemon.Die();
  EXPECT_FALSE(trainer.layout->WaitStep(1, kPatience).ok());
  // Takes so much time that a stream that nothing holds would go on.
  for (int i = 0; i < 50; ++i) CUDA_OK(cuMemsetD32Async(scratch, 0, 1, other));
  CUDA_OK(cuStreamSynchronize(other));
  EXPECT_EQ(cuStreamQuery(optimizer), CUDA_ERROR_NOT_READY);
  busy.Store(1);
  const CUdeviceptr verdict = AddressOf(trainer.layout->device_verdict(1));
  EXPECT_THAT(fakes::ReadFloats(verdict, 1, optimizer), ElementsAre(1));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaHandoff, DestructorReleasesParkedStreams, MachineWithGpus(1)) {
  Trainer trainer;
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.layout->WaitOnStream(1, trainer.stream).ok());
  trainer.layout.reset();
  CUDA_OK(cuStreamSynchronize(trainer.stream));
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
  EXPECT_THAT(FakeMachine().Journal(fakes::kBlocked), IsEmpty());
}

ISOLATED_TEST(CudaHandoff, CapturingStreamsAreRefused, MachineWithGpus(1)) {
  Trainer trainer;
  CUstream captured = MakeStream();
  CUDA_OK(cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
  const absl::Status marked = trainer.layout->MarkReady(1, 0, {trainer.stream, captured});
  EXPECT_EQ(marked.code(), absl::StatusCode::kFailedPrecondition) << marked;
  EXPECT_EQ(ReasonOf(marked), "CAPTURING");
  EXPECT_THAT(std::string(marked.message()), HasSubstr("step 1, bucket 0"));
  EXPECT_EQ(ReasonOf(trainer.layout->FinishStep(1, {}, {captured})), "CAPTURING");
  const FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuStreamWriteValue64_v2", getpid()), 0u);
  }
  EXPECT_TRUE(trainer.daemon.Silent());

  // Nothing was marked.
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  EXPECT_EQ(ReasonOf(trainer.layout->WaitOnStream(1, captured)), "CAPTURING");
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuStreamWaitValue64_v2", getpid()), 0u);
  }
  CUgraph graph = nullptr;
  CUDA_OK(cuStreamEndCapture(captured, &graph));
}

ISOLATED_TEST(CudaHandoff, StreamMayBeDestroyedAfterTheCall, MachineWithGpus(1)) {
  Trainer trainer;
  CUstream early = MakeStream();
  trainer.Write(0, 8, early);
  ASSERT_TRUE(trainer.layout->MarkReady(1, 0, {early}).ok());
  CUDA_OK(cuStreamDestroy(early));
  ASSERT_TRUE(trainer.worker.AwaitReady(0, 1));
  EXPECT_EQ(trainer.worker.Read(OffsetOf(0)), 8);
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());

  // On the fakes a call that gets a destroyed stream fails. On a real machine that is undefined.
  if (!FakeMachine().fake()) return;
  const absl::Status refused = trainer.layout->MarkReady(1, 1, {early});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_EQ(ReasonOf(refused), "BAD_STREAM");
  ASSERT_TRUE(trainer.layout->MarkReady(1, 1, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.layout->EndStep(1).ok());
}

ISOLATED_TEST(CudaHandoff, MistakesAreRefused, MachineWithGpus(1)) {
  Trainer trainer;
  const absl::Status without = trainer.layout->MarkReady(1, 0);
  EXPECT_EQ(without.code(), absl::StatusCode::kInvalidArgument) << without;
  EXPECT_EQ(trainer.layout->MarkReady(1, 0, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(trainer.layout->FinishStep(1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(trainer.layout->MarkReady(1, kBuckets, {trainer.stream})), "UNKNOWN_BUCKET");
  EXPECT_EQ(ReasonOf(trainer.layout->WaitOnStream(1, kBuckets, trainer.stream)), "UNKNOWN_BUCKET");
  // The stream that must mark it would wait for it.
  EXPECT_EQ(ReasonOf(trainer.layout->WaitOnStream(1, 0, trainer.stream)), "PROTOCOL_VIOLATION");
  ASSERT_TRUE(trainer.layout->MarkReady(1, 0, {trainer.stream}).ok());
  EXPECT_EQ(ReasonOf(trainer.layout->MarkReady(1, 0, {trainer.stream})), "ALREADY_READY");
  EXPECT_EQ(ReasonOf(trainer.layout->WaitOnStream(1, trainer.stream)), "PROTOCOL_VIOLATION");
}

ISOLATED_TEST(CudaHandoff, TwoStepsMayBeUnderWay, MachineWithGpus(1)) {
  Trainer trainer;
  for (std::uint64_t step = 1; step <= 2; ++step) {
    EXPECT_EQ(trainer.layout->next_step(), step);
    const absl::Status finished = trainer.layout->FinishStep(step, {}, {trainer.stream});
    ASSERT_TRUE(finished.ok()) << finished;
    ASSERT_TRUE(trainer.daemon.Next()->has_end_step());
  }
  EXPECT_EQ(ReasonOf(trainer.layout->MarkReady(1, 0, {trainer.stream})), "PROTOCOL_VIOLATION");
  const absl::Status third = trainer.layout->MarkReady(3, 0, {trainer.stream});
  EXPECT_EQ(ReasonOf(third), "PROTOCOL_VIOLATION");
  EXPECT_THAT(std::string(third.message()), HasSubstr("wait for the verdict of step 1"));

  trainer.Decide(1, v1::VERDICT_VOID);
  EXPECT_EQ(ReasonOf(trainer.layout->WaitStep(1, kPatience).status()), "STEP_VOID");
  ASSERT_TRUE(trainer.layout->MarkReady(3, 0, {trainer.stream}).ok());
  trainer.Decide(2, v1::VERDICT_COMPLETE);
  EXPECT_TRUE(trainer.layout->WaitStep(2, kPatience).ok());
  // The verdict before is kept too.
  EXPECT_EQ(ReasonOf(trainer.layout->WaitStep(1, kPatience).status()), "STEP_VOID");
  EXPECT_EQ(trainer.layout->next_step(), 3u);
  EXPECT_TRUE(trainer.layout->FinishStep(3, {}, {trainer.stream}).ok());
}

ISOLATED_TEST(CudaHandoff, UnusedGradientsBecomeZerosInTheStreamsOrder, MachineWithGpus(1)) {
  Trainer trainer;
  trainer.Write(0, 6, trainer.stream);
  trainer.Write(1, 7, trainer.stream);
  ASSERT_TRUE(trainer.layout->MarkUnused(1, 1).ok());
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  const auto message = trainer.daemon.Next();
  ASSERT_TRUE(message.has_value() && message->has_end_step());
  EXPECT_EQ(message->end_step().used_map(), "\x01");
  ASSERT_TRUE(trainer.worker.AwaitReady(1, 1));
  EXPECT_EQ(trainer.worker.Read(OffsetOf(0)), 6);
  EXPECT_EQ(trainer.worker.Read(OffsetOf(1)), 0);
}

ISOLATED_TEST(CudaHandoff, GpuFaultIsReported, MachineWithGpus(1)) {
  Trainer trainer;
  FakeMachine machine;
  machine.Inject("cuStreamWriteValue64_v2 1 sticky 719");  // CUDA_ERROR_LAUNCH_FAILED
  const absl::Status marked = trainer.layout->MarkReady(1, 0, {trainer.stream});
  EXPECT_EQ(marked.code(), absl::StatusCode::kUnavailable) << marked;
  EXPECT_EQ(ReasonOf(marked), "GPU_FAULT");
}

ISOLATED_TEST(CudaHandoff, LostMpsIsAGpuFault, MachineWithGpus(1)) {
  Trainer trainer;
  FakeMachine machine;
  machine.Inject("cuStreamWriteValue64_v2 1 error 806");  // CUDA_ERROR_MPS_RPC_FAILURE
  EXPECT_EQ(ReasonOf(trainer.layout->MarkReady(1, 0, {trainer.stream})), "GPU_FAULT");
}

ISOLATED_TEST(CudaArena, ViewKeepsTheMapping, MachineWithGpus(1)) {
  FakeMachine machine;
  Trainer trainer;
  const std::size_t before = machine.fake() ? machine.DeviceBytes(0) : 0;
  const CUdeviceptr address = AddressOf(trainer.layout->bucket(0).data);
  auto mapping = trainer.layout->Mapping();
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  trainer.layout.reset();
  trainer.session.reset();
  CUDA_OK(cuMemsetD32Async(address, 0x3F800000, kCount, trainer.stream));
  EXPECT_THAT(fakes::ReadFloats(address, 1, trainer.stream), ElementsAre(1));
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuMemHostUnregister", getpid()), 1u);
    EXPECT_EQ(machine.Calls("cuMemUnmap", getpid()), 0u);
    EXPECT_EQ(machine.DeviceBytes(0), before);
  }
  for (int i = 0; i < 20; ++i) CUDA_OK(cuMemsetD32Async(address, 0, kCount, trainer.stream));
  mapping.reset();  // they are queued still
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuMemUnmap", getpid()), 1u);
  }
  CUDA_OK(cuStreamSynchronize(trainer.stream));
  EXPECT_THAT(machine.Violations(), IsEmpty());
}

ISOLATED_TEST(CudaArena, OpensByIpcHandle, MachineWithGpus(1)) {
  Trainer trainer(CudaWorkerRole::Memory::kIpc);
  trainer.Write(0, 9, trainer.stream);
  ASSERT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  ASSERT_TRUE(trainer.worker.AwaitReady(0, 1));
  EXPECT_EQ(trainer.worker.Read(OffsetOf(0)), 9);
  trainer.layout.reset();
  const FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuIpcCloseMemHandle", getpid()), 1u);
  }
  EXPECT_THAT(FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaArena, ForkedChildKeepsTheMapping, MachineWithGpus(1)) {
  Trainer trainer;
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        ErrorReason(trainer.layout->MarkReady(1, 0, {trainer.stream})) == "FORKED" &&
        ErrorReason(trainer.layout->WaitOnStream(1, trainer.stream)) == "FORKED" &&
        ErrorReason(CudaDeviceUuid(0).status()) == "FORKED";
    trainer.layout.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuMemUnmap", child), 0u);
  }
  EXPECT_TRUE(trainer.layout->FinishStep(1, {}, {trainer.stream}).ok());
  EXPECT_TRUE(trainer.worker.AwaitReady(1, 1));
}

// ---- before there is a layout ----

// Registers on `device`; the daemon does not answer.
absl::Status RegisterOn(const std::string& device) {
  ScriptedDaemon daemon;
  SessionOptions options;
  options.socket = daemon.socket();
  options.job_id = "job";
  const auto session = Session::Join(options);
  if (!session.ok()) return session.status();
  return (*session)->RegisterLayout(SpecOn(device)).status();
}

ISOLATED_TEST(CudaDevice, IsNamedByItsUuid, MachineWithGpus(2)) {
  const auto second = CudaDeviceUuid(1);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, GpuUuid(1));
  EXPECT_EQ(ReasonOf(CudaDeviceUuid(2).status()), "GPU_UNUSABLE");
  EXPECT_EQ(ReasonOf(RegisterOn("cuda:0")), "MALFORMED");
  const absl::Status hidden = RegisterOn(GpuUuid(7));
  EXPECT_EQ(ReasonOf(hidden), "GPU_NOT_VISIBLE");
  EXPECT_THAT(std::string(hidden.message()), HasSubstr(GpuUuid(0) + ", " + GpuUuid(1)));
}

ISOLATED_TEST(CudaDevice, UnusableDeviceSaysWhatToDo, MachineWithGpus(1)) {
  FakeMachine machine;
  machine.Inject("cuInit 1 error 999");  // CUDA_ERROR_UNKNOWN: without /dev/nvidia-uvm, say
  const absl::Status closed = CudaDeviceUuid(0).status();
  EXPECT_EQ(closed.code(), absl::StatusCode::kFailedPrecondition) << closed;
  EXPECT_EQ(ReasonOf(closed), "GPU_UNUSABLE");
  EXPECT_THAT(std::string(closed.message()), HasSubstr("nvidia-uvm"));
}

ISOLATED_TEST(CudaDevice, FullMpsHasAReasonOfItsOwn, MachineWithGpus(1)) {
  FakeMachine machine;
  machine.Inject("cuInit 1 error 808");  // CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
  const absl::Status full = CudaDeviceUuid(0).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(ReasonOf(full), "MPS_FULL");
}

ISOLATED_TEST(CudaDevice, MpsThatIsNotReadyNamesItsControlProgram, MachineWithGpus(1)) {
  FakeMachine machine;
  machine.Inject("cuDeviceGet 1 error 807");  // CUDA_ERROR_MPS_SERVER_NOT_READY
  const absl::Status waiting = CudaDeviceUuid(0).status();
  EXPECT_EQ(ReasonOf(waiting), "GPU_UNUSABLE");
  EXPECT_THAT(std::string(waiting.message()), HasSubstr("nvidia-cuda-mps-control"));
}

fakes::MachineDescription WithoutStreamMemoryOperations() {
  auto machine = MachineWithGpus(1);
  machine.gpus[0].stream_memory_operations = false;
  return machine;
}

ISOLATED_TEST(CudaDevice, NeedsStreamMemoryOperations, WithoutStreamMemoryOperations()) {
  EXPECT_EQ(ReasonOf(RegisterOn(GpuUuid(0))), "GPU_UNSUPPORTED");
}

ISOLATED_TEST(CudaDriver, MayBeMissing, MachineWithGpus(1)) {
  setenv("GRADSYNC_CUDA_LIBRARY", "libcuda-of-no-machine.so.1", 1);
  const absl::Status missing = RegisterOn(GpuUuid(0));
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition) << missing;
  EXPECT_EQ(ReasonOf(missing), "CUDA_DRIVER_MISSING");
  EXPECT_THAT(std::string(missing.message()), HasSubstr("libcuda-of-no-machine.so.1"));
}

ISOLATED_TEST(CudaDriver, MayBeTooOld, MachineWithGpus(1)) {
  setenv("GRADSYNC_CUDA_LIBRARY", "tests/cuda/libold.so", 1);
  const absl::Status old = CudaDeviceUuid(0).status();
  EXPECT_EQ(ReasonOf(old), "CUDA_DRIVER_TOO_OLD");
  EXPECT_THAT(std::string(old.message()), AllOf(HasSubstr("cuGetProcAddress_v2"),
                                                HasSubstr("CUDA 13.0 or newer (580 or newer)")));
}

}  // namespace
}  // namespace gradsync
