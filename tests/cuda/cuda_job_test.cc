// Jobs whose layouts lie on a GPU: a real gradsyncd with its worker, and the client, on fakes of
// the driver.

#include <cuda.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "tests/client/job_of_threads.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"
#include "tests/kit/deadline.h"

namespace gradsync {
namespace {

using fakes::FakeMachine;
using fakes::GpuUuid;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr std::uint32_t kRanks = 2;
constexpr std::size_t kBuckets = 3;
constexpr std::size_t kCount = 1000;
constexpr absl::Duration kPatience = absl::Milliseconds(kPatienceMs);

CUdeviceptr AddressOf(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

// The path of a file that the build puts beside this program.
std::string Absolute(const std::string& path) { return std::filesystem::absolute(path).string(); }

LayoutSpec On(const std::string& device, LayoutSpec spec) {
  spec.device = device;
  return spec;
}

// A job of two ranks, both in this process, each with its own stream.
class GpuJob {
 public:
  explicit GpuJob(int gpus = 1, const std::vector<std::string>& flags = {})
      : gpus_(gpus), daemon_(WithFakes(flags)) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      contexts_.push_back(fakes::EnterContext(GpuOf(rank)));
      streams_.push_back(fakes::MakeStream());
    }
  }

  TestDaemon& daemon() { return daemon_; }
  FakeMachine& machine() { return machine_; }
  Layout& layout(std::uint32_t rank) { return *job_.layouts[rank]; }
  CUstream stream(std::uint32_t rank) { return streams_[rank]; }
  int GpuOf(std::uint32_t rank) const { return static_cast<int>(rank) % gpus_; }
  // The pid of the worker on a GPU: another process with a context there. -1: none.
  int Worker(std::uint32_t gpu) const {
    for (const int process : machine_.ContextsOn(gpu)) {
      if (process != getpid()) return process;
    }
    return -1;
  }
  // Makes the rank's context current.
  void Enter(std::uint32_t rank) { CUDA_OK(cuCtxSetCurrent(contexts_[rank])); }

  // Applies from the next generation on.
  void set_nccl(const NcclSettings& nccl) { nccl_ = nccl; }
  void set_spec(const LayoutSpec& spec) { spec_ = spec; }

  void Join() {
    std::vector<SessionOptions> options;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      options.push_back(OptionsOf(daemon_, rank, kRanks));
      options.back().nccl = nccl_;
    }
    job_ = JoinAll(options, nullptr);
    OnEveryRank(kRanks, [this](std::uint32_t rank) {
      auto layout = job_.sessions[rank]->RegisterLayout(On(GpuUuid(GpuOf(rank)), spec_));
      ASSERT_TRUE(layout.ok()) << layout.status();
      job_.layouts[rank] = *std::move(layout);
    });
  }
  // Ends without Leave, so the other rank loses this one.
  void EndSession(std::uint32_t rank) { job_.sessions[rank].reset(); }
  // Waits for the ranks' GPUs, so no stream may be parked.
  void End() {
    job_.layouts.clear();
    job_.sessions.clear();
  }

  // Enqueues the kernels that write a bucket's gradients.
  void Write(std::uint32_t rank, std::size_t bucket, float value) {
    Enter(rank);
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const BucketView view = layout(rank).bucket(bucket);
    const std::size_t words = view.count * ItemSize(view.dtype) / sizeof(bits);
    CUDA_OK(cuMemsetD32Async(AddressOf(view.data), bits, words, stream(rank)));
  }
  std::vector<float> Read(std::uint32_t rank, std::size_t bucket) {
    Enter(rank);
    const BucketView view = layout(rank).bucket(bucket);
    const std::size_t words = view.count * ItemSize(view.dtype) / sizeof(float);
    return fakes::ReadFloats(AddressOf(view.data), words, stream(rank));
  }
  float Verdict(std::uint32_t rank, std::uint64_t step) {
    Enter(rank);
    return fakes::ReadFloats(AddressOf(layout(rank).device_verdict(step)), 1, stream(rank))[0];
  }

  // One rank's step, up to its stream's wait for the averages. The host does not wait.
  void Step(std::uint32_t rank, std::uint64_t step, float value) {
    Mark(rank, step, value);
    EndStep(rank, step);
  }
  void Mark(std::uint32_t rank, std::uint64_t step, float value) {
    for (std::size_t bucket = 0; bucket < layout(rank).bucket_count(); ++bucket) {
      Write(rank, bucket, value + static_cast<float>(bucket));
      const absl::Status marked = layout(rank).MarkReady(step, bucket, {stream(rank)});
      EXPECT_TRUE(marked.ok()) << marked;
    }
  }
  void EndStep(std::uint32_t rank, std::uint64_t step) {
    const absl::Status ended = layout(rank).EndStep(step);
    EXPECT_TRUE(ended.ok()) << ended;
    const absl::Status waits = layout(rank).WaitOnStream(step, stream(rank));
    EXPECT_TRUE(waits.ok()) << waits;
  }

 private:
  static std::vector<std::string> WithFakes(std::vector<std::string> flags) {
    flags.push_back("--cuda_library=" + Absolute("tests/fakes/cuda/libcuda.so.1"));
    flags.push_back("--nccl_library=" + Absolute("tests/fakes/nccl/libnccl.so.2"));
    return flags;
  }

  const int gpus_;
  FakeMachine machine_;
  TestDaemon daemon_;
  NcclSettings nccl_;
  LayoutSpec spec_ = FloatBuckets(kBuckets, kCount);
  std::vector<CUcontext> contexts_;
  std::vector<CUstream> streams_;
  JobOfThreads job_;
};

ISOLATED_TEST(GpuJob, AveragesOnTheTrainersStreams, MachineWithGpus(1)) {
  GpuJob job;
  job.Join();
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const auto value = static_cast<float>(10 * step);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, step, value + 2 * rank);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(job.Verdict(rank, step), 0) << "though the stream waits only for the averages";
      for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
        EXPECT_THAT(job.Read(rank, bucket), Each(value + 1 + static_cast<float>(bucket)));
      }
      const auto result = job.layout(rank).WaitStep(step, kPatience);
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->live_ranks, kRanks);
    }
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuJob, KeepsOneCommunicatorOverGenerations, MachineWithGpus(2)) {
  GpuJob job(2);
  for (int life = 0; life < 5; ++life) {
    job.Join();
    for (std::uint64_t step = 1; step <= 2; ++step) {
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
        job.Step(rank, step, 4 + 2 * static_cast<float>(rank));
      }
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
        EXPECT_THAT(job.Read(rank, 1), Each(6.0f));
        EXPECT_EQ(job.Verdict(rank, step), 0);
        const auto result = job.layout(rank).WaitStep(step, kPatience);
        ASSERT_TRUE(result.ok()) << result.status();
      }
    }
    // A trainer dies in the middle of a step.
    job.Step(0, 3, 1);
    job.EndSession(1);
    EXPECT_EQ(ErrorReason(job.layout(0).WaitStep(3, kPatience).status()), "RANK_LOST");
    job.End();
  }
  if (job.machine().fake()) {
    EXPECT_EQ(job.machine().Calls("ncclCommInitRankConfig"), 2u) << "one for each GPU";
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuJob, RunsTwoStepsAtOnce, MachineWithGpus(1)) {
  GpuJob job;
  job.Join();
  // Rank 1 is a step ahead. Its messages about step 2 wait until step 1 is decided.
  job.Step(1, 1, 4);
  job.Step(1, 2, 6);
  job.Step(0, 1, 2);
  job.Step(0, 2, 2);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(job.Read(rank, 0), Each(4.0f));
    for (const std::uint64_t step : {1, 2}) {
      EXPECT_EQ(job.Verdict(rank, step), 0);
      EXPECT_TRUE(job.layout(rank).WaitStep(step, kPatience).ok());
    }
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuJob, AbandonedStepIsVoidOnEveryStream, MachineWithGpus(1)) {
  GpuJob job;
  job.Join();
  job.Step(0, 1, 1);
  ASSERT_TRUE(job.layout(1).MarkReady(1, 0, {job.stream(1)}).ok());
  ASSERT_TRUE(job.layout(1).AbandonStep(1, "out of memory").ok());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto result = job.layout(rank).WaitStep(1, kPatience);
    EXPECT_EQ(ErrorReason(result.status()), "STEP_ABANDONED") << result.status();
  }
  EXPECT_EQ(job.Verdict(0, 1), 1);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 2, 3);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(job.Read(rank, 0), Each(3.0f));
    EXPECT_TRUE(job.layout(rank).WaitStep(2, kPatience).ok());
  }
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// A step of which both streams have seen the averages and the verdict: complete. It stays complete,
// though rank 1 ends or abandons it afterwards.
class SeenStep {
 public:
  SeenStep() {
    LayoutSpec spec;
    spec.parameters.push_back({"weight", {kCount}, DataType::kFloat32});
    job_.set_spec(spec);
    job_.Join();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) job_.Mark(rank, 1, 4 + 2 * rank);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_TRUE(job_.layout(rank).WaitOnStream(1, job_.stream(rank)).ok());
      EXPECT_EQ(job_.Verdict(rank, 1), 0);
    }
  }

  GpuJob& job() { return job_; }

 private:
  GpuJob job_;
};

ISOLATED_TEST(GpuJob, StepSeenCompleteByStreamsOutlivesARank, MachineWithGpus(1)) {
  SeenStep seen;
  Layout& survivor = seen.job().layout(0);
  seen.job().EndSession(1);
  const auto result = survivor.WaitStep(1, kPatience);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->live_ranks, kRanks);
  EXPECT_EQ(result->divisor, kRanks);
  EXPECT_EQ(ErrorReason(survivor.WaitStep(2, kPatience).status()), "RANK_LOST");
}

ISOLATED_TEST(GpuJob, StepSeenCompleteByStreamsCannotBeAbandoned, MachineWithGpus(1)) {
  SeenStep seen;
  GpuJob& job = seen.job();
  // Rank 0 has not used the parameter. Rank 1 may have used it.
  ASSERT_TRUE(job.layout(0).EndStep(1, {false}).ok());
  ASSERT_TRUE(job.layout(1).AbandonStep(1, "out of memory").ok());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto result = job.layout(rank).WaitStep(1, kPatience);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->used, Each(true));
  }
}

ISOLATED_TEST(GpuJob, LostTrainerReleasesTheOthersAndItsMemory, MachineWithGpus(1)) {
  GpuJob job;
  job.Join();
  // Counts workers' contexts: the trainers are in this process.
  const bool fake = job.machine().fake();
  const auto count = [&job, fake]() -> std::uint64_t {
    if (!fake) return 0;
    return job.machine().Calls("cuDevicePrimaryCtxRetain") -
           job.machine().Calls("cuDevicePrimaryCtxRetain", getpid());
  };
  const std::uint64_t contexts = count();
  // Memory in use on the GPU. Other tests use a real GPU, too: there, the daemon's arenas.
  const auto used = [&job, fake]() -> std::uint64_t {
    return fake ? job.machine().DeviceBytes(0) : job.daemon().Status().cuda().arena_bytes();
  };
  const std::uint64_t bytes = used();
  EXPECT_GT(bytes, 0u);
  for (int life = 0; life < 3; ++life) {
    job.Step(0, 1, 1);
    job.EndSession(1);
    const auto result = job.layout(0).WaitStep(1, kPatience);
    EXPECT_EQ(ErrorReason(result.status()), "RANK_LOST") << result.status();
    EXPECT_EQ(job.Verdict(0, 1), 1);
    job.End();
    job.Join();
  }
  EXPECT_EQ(count(), contexts) << "a worker outlives its trainers";
  EXPECT_EQ(used(), bytes) << "but not their memory";
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(GpuJob, KilledWorkerFailsTheJobWithItsError, MachineWithGpus(1)) {
  GpuJob job;
  job.set_spec(FloatBuckets(1, kCount));
  job.Join();
  job.machine().Inject("cuLaunchKernel 1 error 700");
  job.Step(0, 1, 1);
  job.Mark(1, 1, 1);  // rank 1 may know of the failure as soon as this has returned
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto result = job.layout(rank).WaitStep(1, kPatience);
    EXPECT_FALSE(result.ok());
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS"));
  }
  EXPECT_EQ(job.Verdict(0, 1), 1);
}

MachineDescription WithAnOldNccl() {
  MachineDescription machine = MachineWithGpus(2);
  machine.nccl_version = 21805;
  return machine;
}

ISOLATED_TEST(GpuJob, OldNcclFailsAJobOnTwoGpus, WithAnOldNccl()) {
  GpuJob job(2);
  job.set_spec(FloatBuckets(1, kCount));  // its only mark fails
  job.Join();
  job.Step(0, 1, 1);
  job.Mark(1, 1, 1);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const absl::Status why = job.layout(rank).WaitStep(1, kPatience).status();
    EXPECT_EQ(why.code(), absl::StatusCode::kFailedPrecondition) << why;
    EXPECT_EQ(ErrorReason(why), "NCCL_TOO_OLD") << why;
    EXPECT_THAT(std::string(why.message()),
                AllOf(HasSubstr("is version 2.18.5: gradsync needs NCCL 2.19.0 or newer"),
                      HasSubstr("install 2.19.0 or newer where the daemon's loader")));
  }
  EXPECT_EQ(job.Verdict(0, 1), 1);
}

// Two ranks on two GPUs. Step 1 has connected the GPUs. In step 2, rank 1 has marked its buckets
// ready, but its stream has not written the gradients.
constexpr std::uint64_t kLateStep = 2;
class LateGradients {
 public:
  explicit LateGradients(const std::vector<std::string>& flags) : job_(2, flags) {
    job_.Join();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) job_.Step(rank, 1, 1);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_TRUE(job_.layout(rank).WaitStep(1, kPatience).ok());
    }
    launches_before_ = job_.machine().Calls("ncclAllReduce");
    job_.Enter(1);
    gradients_ = std::make_unique<fakes::Word>();
    CUDA_OK(
        cuStreamWaitValue64(job_.stream(1), gradients_->address(), 1, CU_STREAM_WAIT_VALUE_GEQ));
    job_.Step(0, kLateStep, 4);
    job_.Mark(1, kLateStep, 6);
  }
  ~LateGradients() { Arrive(); }

  GpuJob& job() { return job_; }
  // The number of all-reduces in step 2.
  std::uint64_t Launches() { return job_.machine().Calls("ncclAllReduce") - launches_before_; }
  // False if no launch begins within the test's patience.
  bool AwaitLaunch() {
    const absl::Time end = absl::Now() + kPatience;
    while (Launches() == 0 && absl::Now() < end) sched_yield();
    return Launches() > 0;
  }
  void Arrive() { gradients_->Store(1); }
  void ExpectAverages() {
    job_.EndStep(1, kLateStep);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_THAT(job_.Read(rank, 1), Each(6.0f));
      const auto result = job_.layout(rank).WaitStep(kLateStep, kPatience);
      EXPECT_TRUE(result.ok()) << result.status();
    }
    EXPECT_THAT(job_.machine().Violations(), IsEmpty());
  }

 private:
  GpuJob job_;
  std::uint64_t launches_before_ = 0;
  std::unique_ptr<fakes::Word> gradients_;
};

ISOLATED_TEST(GpuJob, EachGenerationChoosesNcclSettings, MachineWithGpus(2)) {
  GpuJob job(2);
  const auto live = [&job](const NcclSettings& nccl) {
    job.set_nccl(nccl);
    job.Join();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 4 + 2 * rank);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_THAT(job.Read(rank, 1), Each(6.0f));
      EXPECT_TRUE(job.layout(rank).WaitStep(1, kPatience).ok());
    }
    job.End();
    return job.machine().Journal("communicator");
  };
  EXPECT_THAT(live({}), ElementsAre("maxCTAs= NCCL_ALGO= NCCL_PROTO=",  //
                                    "maxCTAs= NCCL_ALGO= NCCL_PROTO="));
  const NcclSettings chosen{4, NcclAlgorithm::kRing, NcclProtocol::kLl128, NcclWireType::kAuto};
  EXPECT_EQ(live(chosen).back(), "maxCTAs=4 NCCL_ALGO=Ring NCCL_PROTO=LL128");
  EXPECT_THAT(live(chosen), SizeIs(4)) << "the communicators are kept";
  EXPECT_EQ(live({}).back(), "maxCTAs= NCCL_ALGO= NCCL_PROTO=");
  EXPECT_THAT(job.machine().Violations(), IsEmpty());
}

// Twice this value is out of float16's range.
constexpr std::uint16_t k60000 = 0x7b53;
constexpr std::uint16_t kInfinity = 0x7c00;

std::uint16_t AverageOfTwoLargeHalves(NcclWireType wire_type) {
  GpuJob job(2);
  job.set_nccl({0, {}, {}, wire_type});
  LayoutSpec spec;
  spec.explicit_buckets.assign(kBuckets, {DataType::kFloat16, kCount});
  job.set_spec(spec);
  job.Join();
  float two_halves;
  const std::uint16_t halves[] = {k60000, k60000};
  std::memcpy(&two_halves, halves, sizeof(two_halves));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      job.Write(rank, bucket, two_halves);
      EXPECT_TRUE(job.layout(rank).MarkReady(1, bucket, {job.stream(rank)}).ok());
    }
    job.EndStep(rank, 1);
  }
  std::uint16_t average[2];
  const float read = job.Read(1, 0)[0];
  std::memcpy(average, &read, sizeof(average));
  EXPECT_TRUE(job.layout(1).WaitStep(1, kPatience).ok());
  EXPECT_EQ(job.Verdict(1, 1), 0);
  return average[1];
}

ISOLATED_TEST(GpuJob, SumsFloat16BetweenGpusInFloat32, MachineWithGpus(2)) {
  EXPECT_EQ(AverageOfTwoLargeHalves(NcclWireType::kAuto), k60000);
}

ISOLATED_TEST(GpuJob, SumsFloat16BetweenGpusInFloat16IfAsked, MachineWithGpus(2)) {
  EXPECT_EQ(AverageOfTwoLargeHalves(NcclWireType::kSame), kInfinity);
}

MachineDescription WithMps() {
  MachineDescription machine = MachineWithGpus(2);
  machine.mps = true;
  return machine;
}

ISOLATED_TEST(GpuGate, AutoIsAllNodesWithoutMps, MachineWithGpus(2)) {
  LateGradients late({});
  // Times out, long after rank 0's gradients are ready.
  const auto early = late.job().layout(0).WaitStep(kLateStep, absl::Milliseconds(200));
  EXPECT_EQ(early.status().code(), absl::StatusCode::kDeadlineExceeded) << early.status();
  EXPECT_EQ(late.Launches(), 0u);
  late.Arrive();
  late.ExpectAverages();
}

ISOLATED_TEST(GpuGate, AutoIsNoneWithMps, WithMps()) {
  LateGradients late({});
  EXPECT_TRUE(late.AwaitLaunch());
  late.Arrive();
  late.ExpectAverages();
}

ISOLATED_TEST(GpuGate, AllNodesIsKeptWithMps, WithMps()) {
  LateGradients late({"--gate=all_nodes"});
  EXPECT_FALSE(late.job().layout(0).WaitStep(kLateStep, absl::Milliseconds(200)).ok());
  EXPECT_EQ(late.Launches(), 0u);
  late.Arrive();
  late.ExpectAverages();
}

ISOLATED_TEST(GpuGate, NoneIsKeptWithoutMps, MachineWithGpus(2)) {
  LateGradients late({"--gate=none"});
  EXPECT_TRUE(late.AwaitLaunch());
  late.Arrive();
  late.ExpectAverages();
}

ISOLATED_TEST(GpuGate, AbandonedStepIsLaunchedNowhere, MachineWithGpus(2)) {
  LateGradients late({});
  ASSERT_TRUE(late.job().layout(1).AbandonStep(kLateStep, "out of memory").ok());
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto result = late.job().layout(rank).WaitStep(kLateStep, kPatience);
    EXPECT_EQ(ErrorReason(result.status()), "STEP_ABANDONED") << result.status();
  }
  EXPECT_EQ(late.Launches(), 0u) << "no GPU launches";
  late.Arrive();
  EXPECT_EQ(late.job().Verdict(0, kLateStep), 1);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) late.job().Step(rank, kLateStep + 1, 3);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(late.job().Read(rank, 0), Each(3.0f));
    EXPECT_TRUE(late.job().layout(rank).WaitStep(kLateStep + 1, kPatience).ok());
  }
  EXPECT_THAT(late.job().machine().Violations(), IsEmpty());
}

// The gate waits for a worker's gradients. That worker dies when it is pinged.
ISOLATED_TEST(GpuGate, WorkerThatDiesBeforeALaunchEndsNoOtherWorker, MachineWithGpus(2)) {
  LateGradients late({});
  GpuJob& job = late.job();
  job.EndStep(1, kLateStep);
  const int lives = job.Worker(0);
  const int dies = job.Worker(1);
  job.machine().Inject(absl::StrCat("cuStreamQuery 1 kill pid=", dies));
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto result = job.layout(rank).WaitStep(kLateStep, kPatience);
    EXPECT_THAT(std::string(result.status().message()),
                HasSubstr("the GPU's worker process was killed"));
  }
  late.Arrive();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job.Verdict(rank, kLateStep), 1);
  EXPECT_EQ(late.Launches(), 0u);
  EXPECT_EQ(job.Worker(1), -1);
  job.End();
  job.Join();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 5);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) EXPECT_THAT(job.Read(rank, 0), Each(5.0f));
  EXPECT_EQ(job.Worker(0), lives);
}

ISOLATED_TEST(GpuJob, MissingDeviceIsRefused, MachineWithGpus(1)) {
  GpuJob job;
  auto session = Session::Join(OptionsOf(job.daemon(), 0, 1));
  ASSERT_TRUE(session.ok()) << session.status();
  const auto layout = (*session)->RegisterLayout(
      On("GPU-99999999-0000-0000-0000-000000000000", FloatBuckets(1, 10)));
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kFailedPrecondition) << layout.status();
  const auto host = (*session)->RegisterLayout(FloatBuckets(1, 10));
  EXPECT_TRUE(host.ok()) << "the layout in host memory continues: " << host.status();
}

}  // namespace
}  // namespace gradsync
