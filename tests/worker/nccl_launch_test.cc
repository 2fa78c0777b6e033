// Buckets between GPUs: two workers, each with its trainers, on a fake NCCL. On a real machine with
// one GPU they share it: their host ids differ, so NCCL takes them for two machines and connects
// them by sockets.

#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>

#include <array>
#include <cmath>
#include <future>
#include <memory>
#include <random>

#include "daemon/base/error.h"
#include "daemon/reduce/gpu_staging.h"
#include "daemon/worker/poll_pace.h"
#include "proto/gradsync/data_type.h"
#include "tests/reduce/half_reference.h"
#include "tests/worker/cuda_worker_fixture.h"

namespace gradsync::daemon {
namespace {

using fakes::GpusThatMayBeOne;
using fakes::kMebibyte;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::size_t kCount = 1000;
constexpr std::size_t kBytes = 4096;

// Two GPUs with a worker and `trainers` trainers each.
class TwoGpus {
 public:
  TwoGpus(std::size_t trainers, std::size_t buckets) {
    for (int gpu = 0; gpu < 2; ++gpu) {
      WorkerProcessOptions options;
      options.environment = {"NCCL_HOSTID=" + std::to_string(gpu), "NCCL_SOCKET_IFNAME=lo"};
      workers_[gpu] = std::make_unique<CudaWorkerFixture>(options, gpu);
      workers_[gpu]->Open();
      for (std::size_t i = 0; i < trainers; ++i) {
        trainers_[gpu].push_back(workers_[gpu]->AddTrainer(buckets * kBytes, buckets));
      }
    }
  }

  CudaWorkerFixture& worker(int gpu) { return *workers_[gpu]; }
  FakeTrainer& trainer(int gpu, std::size_t i) { return *trainers_[gpu][i]; }

  void Connect() {
    const std::string id = worker(0).NewNcclId();
    const auto first = worker(0).Connect(id, 0, 2);
    const auto second = worker(1).Connect(id, 1, 2);
    for (PendingReply* const reply : {first.get(), second.get()}) {
      const auto connected = reply->Get();
      ASSERT_TRUE(connected.ok()) << connected.status();
      // On a real GPU other tests run beside this one, and may free memory meanwhile.
      if (fakes::FakeMachine().fake()) {
        EXPECT_GT(connected->connected().nccl_bytes(), 0u);
      }
    }
  }

  // Launches one bucket on the worker of `gpu`, for all its trainers.
  std::unique_ptr<PendingReply> Launch(int gpu, std::uint64_t step, std::size_t bucket,
                                       std::uint32_t step_buckets = 1) {
    std::vector<FakeTrainer*> ranks;
    for (const auto& trainer : trainers_[gpu]) ranks.push_back(trainer.get());
    auto launch = CudaWorkerFixture::LaunchOf(ranks, step, kCount);
    launch.set_bucket(static_cast<std::uint32_t>(bucket));
    launch.set_offset(bucket * kBytes);
    launch.set_scale(1.0 / static_cast<double>(2 * ranks.size()));
    launch.set_step_buckets(step_buckets);
    launch.set_verdict_offset(verdict_offset_);
    launch.set_staging_data_type(static_cast<std::uint32_t>(staging_));
    return worker(gpu).Launch(launch);
  }
  void PutVerdictAt(std::size_t offset) { verdict_offset_ = offset; }
  void SumAs(DataType staging) { staging_ = staging; }

 private:
  std::size_t verdict_offset_ = kBytes;
  DataType staging_ = DataType::kFloat32;
  std::array<std::unique_ptr<CudaWorkerFixture>, 2> workers_;
  std::array<std::vector<std::unique_ptr<FakeTrainer>>, 2> trainers_;
};

ISOLATED_TEST(NcclLaunch, AveragesOverTheTrainersOfEveryGpu, GpusThatMayBeOne(2)) {
  constexpr std::size_t kBuckets = 6;
  TwoGpus job(2, kBuckets);
  job.PutVerdictAt(kBuckets * kBytes);
  job.Connect();
  for (std::uint64_t step = 1; step <= 20; ++step) {
    std::vector<std::unique_ptr<PendingReply>> done;
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      for (int gpu = 0; gpu < 2; ++gpu) {
        for (std::size_t i = 0; i < 2; ++i) {
          const auto x = static_cast<float>(step * 64 + bucket * 4 + gpu * 2 + i);
          job.trainer(gpu, i).MarkReady(bucket, step, bucket * kBytes,
                                        std::vector<float>(kCount, x));
        }
        done.push_back(job.Launch(gpu, step, bucket, kBuckets));
      }
    }
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      for (int gpu = 0; gpu < 2; ++gpu) {
        for (std::size_t i = 0; i < 2; ++i) {
          job.trainer(gpu, i).WaitDone(bucket, step);
          EXPECT_THAT(job.trainer(gpu, i).Floats(bucket * kBytes, kCount),
                      Each(static_cast<float>(step * 64 + bucket * 4) + 1.5f));
        }
      }
    }
    for (const auto& reply : done) EXPECT_FALSE(reply->Get()->launch_done().void_step());
  }
  for (int gpu = 0; gpu < 2; ++gpu) job.worker(gpu).Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// A machine on which NCCL practically never puts an all-reduce on its stream.
MachineDescription UnsettledMachine() {
  MachineDescription machine = MachineWithGpus(2);
  machine.late_polls = 1 << 30;
  return machine;
}

ISOLATED_TEST(NcclLaunch, CombinesNextBucketsWhileNcclSettles, UnsettledMachine()) {
  constexpr std::size_t kBuckets = 3;
  TwoGpus job(2, kBuckets);
  job.Connect();
  const pid_t pid = job.worker(0).process().pid();
  std::vector<std::unique_ptr<PendingReply>> done;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    for (std::size_t i = 0; i < 2; ++i) job.trainer(0, i).WriteReady(bucket, 1);
    done.push_back(job.Launch(0, 1, bucket, kBuckets));
  }
  const fakes::FakeMachine machine;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (machine.Calls("cuLaunchKernel", pid) < kBuckets &&
         std::chrono::steady_clock::now() < end) {
    job.worker(0).Ping();
  }
  EXPECT_EQ(machine.Calls("cuLaunchKernel", pid), kBuckets);
  EXPECT_EQ(machine.Calls("ncclAllReduce", pid), 1u);
  kill(pid, SIGKILL);
  EXPECT_FALSE(job.worker(0).Ended().ok());
}

// The all-reduce waits for the other worker for as long as a trainer's backward pass takes.
ISOLATED_TEST(NcclLaunch, WorkerLooksLessOftenDuringALongWait, MachineWithGpus(2)) {
  constexpr std::uint64_t kLooks = 100;  // the pauses are the longest by then
  TwoGpus job(1, 1);
  job.Connect();
  const fakes::FakeMachine machine;
  if (!machine.fake()) return;
  const pid_t pid = job.worker(0).process().pid();
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  const auto first = job.Launch(0, 1, 0);
  const auto await_looks = [&](std::uint64_t looks) {
    while (machine.Calls("cuEventQuery", pid) < looks) sched_yield();
  };
  await_looks(kLooks);
  const auto begin = std::chrono::steady_clock::now();
  await_looks(machine.Calls("cuEventQuery", pid) + kLooks);
  EXPECT_GE(std::chrono::steady_clock::now() - begin,
            std::chrono::nanoseconds((kLooks - 1) * PollPace::kMostNs));
  job.trainer(1, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 3));
  const auto second = job.Launch(1, 1, 0);
  EXPECT_TRUE(first->Get().ok());
  EXPECT_TRUE(second->Get().ok());
  EXPECT_THAT(job.trainer(0, 0).Floats(0, kCount), Each(2.0f));
}

// With two GPUs the order of the sum is fixed, so the test knows every bit of the average: each
// GPU's sum is rounded, and then NCCL's sum.
ISOLATED_TEST(NcclLaunch, SumsFloatsInSixteenBits, GpusThatMayBeOne(2)) {
  TwoGpus job(2, 1);
  job.Connect();
  std::uint64_t step = 0;
  for (const DataType staging : {DataType::kBfloat16, DataType::kFloat16}) {
    const HalfFormat& format = staging == DataType::kFloat16 ? kFloat16Format : kBfloat16Format;
    const auto rounded = [&](float x) {
      return static_cast<float>(HalfValue(format, NearestHalf(format, x)));
    };
    job.SumAs(staging);
    ++step;
    std::vector<float> gradients[2][2];
    std::vector<std::unique_ptr<PendingReply>> done;
    for (int gpu = 0; gpu < 2; ++gpu) {
      for (std::size_t i = 0; i < 2; ++i) {
        std::vector<float>& mine = gradients[gpu][i];
        for (std::size_t n = 0; n < kCount; ++n) {
          mine.push_back(std::sin(static_cast<float>(n + 1000 * (2 * gpu + i))));
        }
        mine.back() = 20000;  // in float16 the sum of four is Inf, that of two is not
        job.trainer(gpu, i).MarkReady(0, step, 0, mine);
      }
      done.push_back(job.Launch(gpu, step, 0));
    }
    std::vector<float> average(kCount);
    for (std::size_t n = 0; n < kCount; ++n) {
      average[n] = rounded(rounded(gradients[0][0][n] + gradients[0][1][n]) +
                           rounded(gradients[1][0][n] + gradients[1][1][n])) *
                   0.25f;
    }
    for (int gpu = 0; gpu < 2; ++gpu) {
      const auto reply = done[static_cast<std::size_t>(gpu)]->Get();
      ASSERT_TRUE(reply.ok()) << reply.status();
      EXPECT_FALSE(reply->launch_done().void_step());
      EXPECT_EQ(reply->launch_done().non_finite(), staging == DataType::kFloat16 ? 1u : 0u);
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(job.trainer(gpu, i).Floats(0, kCount), average);
      }
    }
  }
  for (int gpu = 0; gpu < 2; ++gpu) job.worker(gpu).Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(NcclLaunch, LostTrainerVoidsTheStepAndKeepsTheCommunicator, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  job.Connect();
  for (std::uint64_t step = 1; step <= 20; ++step) {
    job.trainer(0, 0).MarkReady(0, step, 0, std::vector<float>(kCount, 1));
    const auto first = job.Launch(0, step, 0);
    // GPU 1 has a new trainer in every step, which is lost before its gradients are ready.
    const auto lost = job.worker(1).AddTrainer(kBytes, 1);
    auto launch = CudaWorkerFixture::LaunchOf({lost.get()}, step, kCount);
    launch.set_verdict_offset(kBytes);
    const auto second = job.worker(1).Launch(launch);
    lost->Unmap();
    EXPECT_TRUE(job.worker(1).Remove(*lost)->Get().ok());
    for (PendingReply* const reply : {first.get(), second.get()}) {
      const auto done = reply->Get();
      ASSERT_TRUE(done.ok()) << done.status();
      EXPECT_TRUE(done->launch_done().void_step());
    }
    job.trainer(0, 0).WaitDone(0, step);
    EXPECT_EQ(job.trainer(0, 0).Floats(kBytes, 1)[0], 1.0f);
  }
  const fakes::FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("ncclCommInitRankConfig"), 2u);  // one for each GPU
  }
}

ISOLATED_TEST(NcclLaunch, MissingRankEndsConnectAtItsLimit, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  const std::string id = job.worker(0).NewNcclId();
  const auto missed = job.worker(0).Connect(id, 0, 2, std::chrono::milliseconds(300));
  job.worker(0).Ping();  // the worker is not blocked meanwhile
  EXPECT_EQ(DetailsOf(missed->Get().status()).reason, "NCCL_TIMEOUT");
  // The worker continues alone. It connects when the other worker connects too.
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 3));
  EXPECT_TRUE(job.Launch(0, 1, 0)->Get().ok());
  EXPECT_THAT(job.trainer(0, 0).Floats(0, kCount), Each(1.5f));
  job.Connect();
}

ISOLATED_TEST(NcclLaunch, WorkerEndsAfterTheLossOfARankInAnAllReduce, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  job.Connect();
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  job.trainer(0, 0).WaitDone(0, 1);
  const auto done = job.Launch(0, 1, 0);
  job.worker(0).Ping();
  kill(job.worker(1).process().pid(), SIGKILL);
  const absl::Status why = job.worker(0).Ended();
  EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
  const auto hangs = HasSubstr("bucket 0 of step 1 has been on the GPU for");
  if (job.worker(0).machine().fake()) {
    EXPECT_THAT(why.message(), hangs);
  } else {
    EXPECT_THAT(why.message(), AnyOf(hangs, HasSubstr("NCCL: ")));
  }
  EXPECT_FALSE(done->Get().ok());
  // The work on the worker's streams ends with the worker, so no rank takes a partial sum for an
  // average.
  EXPECT_THAT(job.worker(0).machine().Violations(), IsEmpty());
  job.trainer(0, 0).Poison(0, 1);
  EXPECT_TRUE(job.trainer(0, 0).Released());
  EXPECT_THAT(job.trainer(0, 0).Floats(0, kCount), Each(1.0f));
}

MachineDescription WithMps() {
  MachineDescription machine = MachineWithGpus(2);
  machine.mps = true;
  return machine;
}

// A client of MPS has few hardware queues. The worker zeroes arenas on a stream that shares none
// with the all-reduce.
ISOLATED_TEST(NcclLaunch, TakesArenasWhileAnAllReduceSpins, WithMps()) {
  TwoGpus job(1, 1);
  job.Connect();
  for (int gpu = 0; gpu < 2; ++gpu) {
    job.trainer(gpu, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  }
  const auto first = job.Launch(0, 1, 0);
  EXPECT_TRUE(job.trainer(0, 0).Released());
  // The all-reduce begins while the worker takes the first few.
  std::vector<std::unique_ptr<FakeTrainer>> others;
  for (int i = 0; i < 10; ++i) {
    others.push_back(job.worker(0).AddTrainer(kBytes, 1));
    ASSERT_NE(others.back(), nullptr) << i;
  }
  const auto second = job.Launch(1, 1, 0);
  for (PendingReply* const reply : {first.get(), second.get()}) {
    const auto done = reply->Get();
    EXPECT_TRUE(done.ok()) << done.status();
  }
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

MachineDescription WithSockets() {
  MachineDescription machine = MachineWithGpus(2);
  machine.nccl_reports_lost_ranks = true;
  return machine;
}

ISOLATED_TEST(NcclLaunch, ReportsTheLossOfARankThatNcclReports, WithSockets()) {
  TwoGpus job(1, 1);
  job.Connect();
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  const auto done = job.Launch(0, 1, 0);
  job.worker(0).Ping();
  kill(job.worker(1).process().pid(), SIGKILL);
  EXPECT_THAT(job.worker(0).Ended().message(), HasSubstr("NCCL: "));
}

ISOLATED_TEST(NcclLaunch, NcclErrorEndsTheWorker, MachineWithGpus(2)) {
  TwoGpus job(1, 1);
  job.Connect();
  fakes::FakeMachine machine;
  machine.Inject("ncclAllReduce 1 async 3 pid=" + std::to_string(job.worker(0).process().pid()));
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  const auto done = job.Launch(0, 1, 0);
  EXPECT_THAT(job.worker(0).Ended().message(), HasSubstr("NCCL: "));
}

ISOLATED_TEST(NcclLaunch, TwoRanksOnOneGpuAreRefused, MachineWithGpus(1)) {
  CudaWorkerFixture first;
  CudaWorkerFixture second;
  first.Open();
  second.Open();
  const std::string id = first.NewNcclId();
  const auto one = first.Connect(id, 0, 2);
  const auto other = second.Connect(id, 1, 2);
  EXPECT_THAT(one->Get().status().message(), AnyOf(HasSubstr("Duplicate"), HasSubstr("NCCL")));
  EXPECT_FALSE(other->Get().ok());
}

ISOLATED_TEST(NcclLaunch, StagingGrowsWhileConnected, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  job.Connect();
  for (int gpu = 0; gpu < 2; ++gpu) {
    const std::uint64_t before = job.worker(gpu).Memory().staging_bytes();
    job.worker(gpu).set_staging_bytes(2 * CudaWorkerFixture::kStagingBytes);
    ASSERT_NE(job.worker(gpu).AddTrainer(kBytes, 1), nullptr);
    EXPECT_GT(job.worker(gpu).Memory().staging_bytes(), before);
  }
  for (int gpu = 0; gpu < 2; ++gpu) {
    job.trainer(gpu, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 2));
  }
  const auto first = job.Launch(0, 1, 0);
  const auto second = job.Launch(1, 1, 0);
  EXPECT_TRUE(first->Get().ok());
  EXPECT_TRUE(second->Get().ok());
  EXPECT_THAT(job.trainer(1, 0).Floats(0, kCount), Each(2.0f));
  for (int gpu = 0; gpu < 2; ++gpu) job.worker(gpu).Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// Takes the rest of a GPU's memory, as PyTorch's cache does.
fakes::Mapped LeaveFree(int gpu, std::size_t bytes) {
  const std::size_t used = fakes::FakeMachine().DeviceBytes(static_cast<std::uint32_t>(gpu));
  fakes::EnterContext(gpu);
  return fakes::MakeMapped(MachineWithGpus(1).gpus[0].memory_bytes - used - bytes, gpu);
}

// One worker that connects to NCCL as the only rank. A real NCCL launches nothing then: these tests
// show that communicators come and go, and nothing about its all-reduce.
class OneGpu {
 public:
  OneGpu() {
    worker_.Open();
    trainer_ = worker_.AddTrainer(kBytes, 1);
  }

  CudaWorkerFixture& worker() { return worker_; }

  void Connect() {
    const auto connected = worker_.Connect(worker_.NewNcclId(), 0, 1)->Get();
    ASSERT_TRUE(connected.ok()) << connected.status();
  }
  // Launches a step whose gradients are all `step`.
  std::unique_ptr<PendingReply> Launch(std::uint64_t step) {
    trainer_->MarkReady(0, step, 0, std::vector<float>(kCount, static_cast<float>(step)));
    return worker_.Launch(CudaWorkerFixture::LaunchOf({trainer_.get()}, step, kCount));
  }
  void ExpectStep(std::uint64_t step) {
    const auto launched = Launch(step)->Get();
    ASSERT_TRUE(launched.ok()) << launched.status();
    EXPECT_FALSE(launched->launch_done().void_step());
    EXPECT_THAT(trainer_->Floats(0, kCount), Each(static_cast<float>(step)));
  }
  // Adds an arena whose layout needs twice the staging.
  std::unique_ptr<FakeTrainer> AddLarger(absl::Status* refused = nullptr) {
    worker_.set_staging_bytes(2 * CudaWorkerFixture::kStagingBytes);
    return worker_.AddTrainer(kBytes, 1, refused);
  }
  // Leaves less memory free than staging takes.
  void FillGpu() { LeaveFree(0, CudaWorkerFixture::kStagingBytes); }

 private:
  CudaWorkerFixture worker_;
  std::unique_ptr<FakeTrainer> trainer_;
};

ISOLATED_TEST(NcclLaunch, ConnectsGrowsAndDisconnectsOnOneGpu, MachineWithGpus(1)) {
  OneGpu job;
  for (std::uint64_t step = 1; step <= 9; step += 3) {
    job.ExpectStep(step);
    job.Connect();
    job.ExpectStep(step + 1);
    if (step == 4) {
      EXPECT_NE(job.AddLarger(), nullptr);
    }
    job.ExpectStep(step + 2);
    EXPECT_TRUE(job.worker().Disconnect().ok());
  }
  job.worker().Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// Connected, a bucket goes through staging. Else one kernel averages it. With one rank NCCL changes
// nothing in between.
ISOLATED_TEST(NcclLaunch, BitsAreTheSameWithAndWithoutStaging, MachineWithGpus(1)) {
  constexpr std::size_t kMost = 10007;  // several blocks, and single elements
  CudaWorkerFixture worker;
  worker.Open();
  std::vector<std::unique_ptr<FakeTrainer>> trainers;
  std::vector<FakeTrainer*> all;
  for (int i = 0; i < 5; ++i) {
    trainers.push_back(worker.AddTrainer(kMost * sizeof(double), 1));
    all.push_back(trainers.back().get());
  }
  std::uint64_t step = 0;
  std::vector<std::vector<std::uint8_t>> results;
  for (const bool connected : {false, true}) {
    if (connected) {
      ASSERT_TRUE(worker.Connect(worker.NewNcclId(), 0, 1)->Get().ok());
    }
    for (const DataType dtype :
         {DataType::kFloat32, DataType::kFloat64, DataType::kFloat16, DataType::kBfloat16}) {
      std::mt19937 random(7);
      ++step;
      for (FakeTrainer* const trainer : all) {
        std::vector<std::uint8_t> bytes(kMost * ItemSize(dtype));
        for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
        // Neither NaN nor Inf: which bits a NaN has is nobody's promise.
        for (std::size_t i = 0; i < kMost; ++i) bytes[(i + 1) * ItemSize(dtype) - 1] &= 0xbf;
        trainer->WriteBytes(0, bytes);
        trainer->WriteReady(0, step);
      }
      auto launch = CudaWorkerFixture::LaunchOf(all, step, kMost);
      launch.set_data_type(static_cast<std::uint32_t>(dtype));
      launch.set_staging_data_type(
          static_cast<std::uint32_t>(StagingType(dtype, NcclWireType::kAuto)));
      launch.set_verdict_offset(kMost * sizeof(double));
      const auto reply = worker.Launch(launch)->Get();
      ASSERT_TRUE(reply.ok()) << reply.status();
      EXPECT_EQ(reply->launch_done().non_finite(), 0u);
      EXPECT_EQ(all.front()->Bytes(0, kMost * ItemSize(dtype)),
                all.back()->Bytes(0, kMost * ItemSize(dtype)));
      results.push_back(all.back()->Bytes(0, kMost * ItemSize(dtype)));
    }
  }
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(results[i], results[i + 4]) << i;
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

// By default NCCL takes a part of it when it connects, and the rest in the first all-reduce. The
// worker has to make NCCL take all of it when it connects.
ISOLATED_TEST(NcclLaunch, ReportsTheMemoryThatNcclTakes, MachineWithGpus(1)) {
  OneGpu job;
  std::size_t others = job.worker().machine().DeviceBytes(0);
  const auto expect_all_reported = [&] {
    EXPECT_EQ(job.worker().Memory().nccl_bytes(), job.worker().machine().DeviceBytes(0) - others);
  };
  for (std::uint64_t step = 1; step <= 4; step += 2) {
    expect_all_reported();
    job.Connect();
    expect_all_reported();
    job.ExpectStep(step);
    expect_all_reported();
    others += fakes::MakeMapped(2 * kMebibyte).bytes;  // memory that a trainer allocates later
    job.ExpectStep(step + 1);
    expect_all_reported();
    EXPECT_TRUE(job.worker().Disconnect().ok());
  }
}

// The GPU is full because PyTorch takes all free memory.
ISOLATED_TEST(NcclLaunch, ReconnectsOnAFullGpu, MachineWithGpus(1)) {
  OneGpu job;
  job.Connect();
  job.ExpectStep(1);
  job.FillGpu();
  for (std::uint64_t step = 2; step <= 7; step += 2) {
    const absl::Status disconnected = job.worker().Disconnect();
    EXPECT_TRUE(disconnected.ok()) << disconnected;
    job.ExpectStep(step);
    job.Connect();
    job.ExpectStep(step + 1);
  }
  job.worker().Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

ISOLATED_TEST(NcclLaunch, FullGpuKeepsItsStaging, MachineWithGpus(1)) {
  OneGpu job;
  job.Connect();
  job.ExpectStep(1);
  job.FillGpu();
  absl::Status refused;
  EXPECT_EQ(job.AddLarger(&refused), nullptr);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, "GPU_OUT_OF_MEMORY");
  EXPECT_THAT(refused.message(), HasSubstr("which has 4194304 free of 1073741824"));
  job.ExpectStep(2);
  job.worker().Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// A GPU without the layout has to take part in the all-reduce, but lacks the memory for it.
ISOLATED_TEST(NcclLaunch, FullGpuWithoutTheLayoutFailsTheLaunch, MachineWithGpus(2)) {
  constexpr std::size_t kLarge = CudaWorkerFixture::kStagingBytes / sizeof(float) + kCount;
  TwoGpus job(1, 1);
  job.Connect();
  const std::size_t rest = LeaveFree(1, CudaWorkerFixture::kStagingBytes).bytes;
  auto without = CudaWorkerFixture::LaunchOf({&job.trainer(0, 0)}, 1, kLarge);
  without.clear_arenas();
  const auto done = job.worker(1).Launch(without);
  for (const absl::Status& why : {done->Get().status(), job.worker(1).Ended()}) {
    EXPECT_EQ(DetailsOf(why).reason, "WORKER_LOST");
    EXPECT_THAT(why.message(), HasSubstr("summing the largest bucket needs "));
    EXPECT_THAT(why.message(), HasSubstr("which has 4194304 free of 1073741824"));
  }
  // The rest belongs to this process: its context, the memory that fills the GPU, and the trainer's
  // arena.
  EXPECT_EQ(job.worker(1).machine().DeviceBytes(1),
            MachineDescription().context_bytes + rest + 2 * kMebibyte);
}

// A hostile coordinator may ask for ids again and again. NCCL keeps a thread and a socket for each.
ISOLATED_TEST(NcclLaunch, WorkerEndsAfterTooManyIdsThatDoNotConnect, MachineWithGpus(1)) {
  OneGpu job;
  std::string id;
  for (int i = 0; i < 16; ++i) id = job.worker().NewNcclId();
  // A Connect with another id ends none of them.
  EXPECT_FALSE(job.worker().Connect("no id", 0, 1)->Get().ok());
  const auto connected = job.worker().Connect(id, 0, 1)->Get();
  ASSERT_TRUE(connected.ok()) << connected.status();
  EXPECT_TRUE(job.worker().Disconnect().ok());
  for (int i = 0; i < 3; ++i) {
    job.Connect();  // as an honest coordinator does
    EXPECT_TRUE(job.worker().Disconnect().ok());
  }
  job.worker().NewNcclId();
  job.ExpectStep(1);
  worker::Call call;
  call.mutable_new_nccl_id();
  EXPECT_FALSE(job.worker().Call(std::move(call)).ok());
  EXPECT_THAT(job.worker().Ended().message(), HasSubstr("16 ids of this worker never connected"));
}

// NCCL says only that CUDA failed. So the worker adds how much memory is free.
ISOLATED_TEST(NcclLaunch, FailedConnectReportsTheFreeBytes, MachineWithGpus(1)) {
  OneGpu job;
  const fakes::Mapped rest = LeaveFree(0, 8 * kMebibyte);
  const absl::Status refused = job.worker().Connect(job.worker().NewNcclId(), 0, 1)->Get().status();
  EXPECT_EQ(DetailsOf(refused).reason, "NCCL_CUDA_ERROR");
  EXPECT_THAT(refused.message(), HasSubstr("the GPU has 8388608 bytes free of 1073741824"));
  job.ExpectStep(1);
  fakes::Unmap(rest);
  CUDA_OK(cuMemRelease(rest.handle));
  job.Connect();
  EXPECT_TRUE(job.worker().Disconnect().ok());
  // There is enough memory to make the communicator, but too little to connect it.
  const fakes::Mapped more = LeaveFree(0, MachineDescription().communicator_bytes + 2 * kMebibyte);
  const absl::Status unconnected =
      job.worker().Connect(job.worker().NewNcclId(), 0, 1)->Get().status();
  EXPECT_THAT(unconnected.message(),
              HasSubstr("unhandled cuda error (run with NCCL_DEBUG=INFO for details)"));
  EXPECT_THAT(unconnected.message(), HasSubstr("has 2097152 bytes free of 1073741824"));
  fakes::Unmap(more);
  CUDA_OK(cuMemRelease(more.handle));
  job.Connect();
  job.worker().machine().Inject("ncclAllReduce 1 async 1 pid=" +
                                std::to_string(job.worker().process().pid()));
  EXPECT_FALSE(job.Launch(2)->Get().ok());
  EXPECT_THAT(job.worker().Ended().message(),
              HasSubstr("unhandled cuda error (run with NCCL_DEBUG=INFO for details)"));
  EXPECT_THAT(job.worker().Ended().message(), HasSubstr("bytes free of 1073741824"));
}

// If one rank's memory is not registered and the others' is, NCCL's behaviour is undefined.
ISOLATED_TEST(NcclLaunch, FailedRegistrationEndsTheWorker, MachineWithGpus(1)) {
  OneGpu job;
  job.Connect();
  job.worker().machine().Inject("ncclCommRegister 1 error 3 pid=" +
                                std::to_string(job.worker().process().pid()));
  absl::Status refused;
  EXPECT_EQ(job.AddLarger(&refused), nullptr);
  EXPECT_THAT(job.worker().Ended().message(), HasSubstr("ncclCommRegister"));
  EXPECT_EQ(DetailsOf(refused).reason, "WORKER_LOST");
}

ISOLATED_TEST(NcclLaunch, StagingGrowsOnAGpuWithoutTheLayout, GpusThatMayBeOne(2)) {
  constexpr std::size_t kLarge = CudaWorkerFixture::kStagingBytes / sizeof(float) + kCount;
  TwoGpus job(1, 1);
  job.Connect();
  job.worker(0).set_staging_bytes(2 * CudaWorkerFixture::kStagingBytes);
  const auto large = job.worker(0).AddTrainer(kLarge * sizeof(float), 1);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    // The large bucket comes after a bucket that is running on that GPU, and before another one.
    for (int gpu = 0; gpu < 2; ++gpu) {
      job.trainer(gpu, 0).MarkReady(0, 2 * step - 1, 0, std::vector<float>(kCount, 1));
      job.trainer(gpu, 0).WaitDone(0, 2 * step - 1);
      job.trainer(gpu, 0).WriteReady(0, 2 * step);
    }
    large->MarkReady(0, step, 0, std::vector<float>(kLarge, 7));
    const auto with = CudaWorkerFixture::LaunchOf({large.get()}, step, kLarge);
    auto without = with;
    without.clear_arenas();
    std::vector<std::unique_ptr<PendingReply>> done;
    done.push_back(job.Launch(0, 2 * step - 1, 0));
    done.push_back(job.Launch(1, 2 * step - 1, 0));
    done.push_back(job.worker(0).Launch(with));
    done.push_back(job.worker(1).Launch(without));
    done.push_back(job.Launch(0, 2 * step, 0));
    done.push_back(job.Launch(1, 2 * step, 0));
    for (const auto& reply : done) {
      const auto launched = reply->Get();
      EXPECT_TRUE(launched.ok()) << launched.status();
    }
    // Each() makes a stream for every one of a million elements.
    EXPECT_TRUE(large->Floats(0, kLarge) == std::vector<float>(kLarge, 7));
  }
  for (int gpu = 0; gpu < 2; ++gpu) job.worker(gpu).Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// NCCL's faster algorithms need equal offsets. They must not depend on what the workers did before.
ISOLATED_TEST(NcclLaunch, BucketsLieAtTheSameOffsetOnEveryGpu, GpusThatMayBeOne(2)) {
  constexpr std::size_t kBuckets = 6;
  // One bucket per piece of staging is small. The later buckets are larger.
  constexpr std::size_t kSmall = 4;
  TwoGpus job(1, kBuckets * 2);
  job.worker(1).set_staging_bytes(3 * CudaWorkerFixture::kStagingBytes);
  ASSERT_NE(job.worker(1).AddTrainer(kBytes, 1), nullptr);
  const auto launch = [&](int gpu, std::uint64_t step, std::size_t bucket, std::uint32_t buckets) {
    auto one = CudaWorkerFixture::LaunchOf({&job.trainer(gpu, 0)}, step,
                                           (bucket < kSmall ? 1 : 2) * kCount);
    one.set_bucket(static_cast<std::uint32_t>(bucket));
    one.set_offset(bucket * 2 * kBytes);
    one.set_step_buckets(buckets);
    one.set_verdict_offset(kBuckets * 2 * kBytes);
    return job.worker(gpu).Launch(one);
  };
  job.trainer(0, 0).WriteReady(0, 1);
  EXPECT_TRUE(launch(0, 1, 0, 1)->Get().ok());
  job.Connect();
  for (std::uint64_t step = 2; step <= 4; ++step) {
    std::vector<std::unique_ptr<PendingReply>> done;
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      for (int gpu = 0; gpu < 2; ++gpu) {
        job.trainer(gpu, 0).WriteReady(bucket, step);
        done.push_back(launch(gpu, step, bucket, kBuckets));
      }
    }
    for (const auto& reply : done) EXPECT_TRUE(reply->Get().ok());
  }
  for (int gpu = 0; gpu < 2; ++gpu) job.worker(gpu).Stop();
  EXPECT_THAT(fakes::FakeMachine().Violations(), IsEmpty());
}

// Freeing the old staging memory waits for the GPU's kernels, and they wait for the other worker.
ISOLATED_TEST(NcclLaunch, StagingGrowsOnlyBetweenBuckets, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  job.Connect();
  CudaWorkerFixture& worker = job.worker(0);
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 1));
  const auto first = job.Launch(0, 1, 0);
  if (worker.machine().fake()) {
    while (worker.machine().Calls("ncclAllReduce", worker.process().pid()) == 0) worker.Ping();
  }
  worker.set_staging_bytes(2 * CudaWorkerFixture::kStagingBytes);
  auto adding = std::async(std::launch::async, [&] { return worker.AddTrainer(kBytes, 1); });
  for (int i = 0; i < 10; ++i) worker.Ping();
  if (worker.machine().fake()) {
    EXPECT_THAT(worker.machine().Journal(fakes::kBlocked), IsEmpty());
  }
  job.trainer(1, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 3));
  const auto second = job.Launch(1, 1, 0);
  EXPECT_TRUE(first->Get().ok());
  EXPECT_TRUE(second->Get().ok());
  EXPECT_NE(adding.get(), nullptr);
  EXPECT_THAT(job.trainer(0, 0).Floats(0, kCount), Each(2.0f));
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(NcclLaunch, NoLaunchBeginsWhileConnecting, GpusThatMayBeOne(2)) {
  TwoGpus job(1, 1);
  const std::string id = job.worker(0).NewNcclId();
  const auto connecting = job.worker(0).Connect(id, 0, 2);
  job.trainer(0, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 2));
  const auto first = job.Launch(0, 1, 0);
  EXPECT_TRUE(job.trainer(0, 0).Released());  // the stream has written its ready word
  for (int i = 0; i < 10; ++i) job.worker(0).Ping();
  const fakes::FakeMachine machine;
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuLaunchKernel"), 0u);
  }
  const auto connected = job.worker(1).Connect(id, 1, 2);
  job.trainer(1, 0).MarkReady(0, 1, 0, std::vector<float>(kCount, 4));
  const auto second = job.Launch(1, 1, 0);
  for (PendingReply* const reply : {connecting.get(), connected.get(), first.get(), second.get()}) {
    EXPECT_TRUE(reply->Get().ok());
  }
  EXPECT_THAT(job.trainer(0, 0).Floats(0, kCount), Each(3.0f));
}

}  // namespace
}  // namespace gradsync::daemon
