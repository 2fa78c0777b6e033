// Buckets on a fake GPU, from Launch to the done words.

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "daemon/base/error.h"
#include "proto/gradsync/data_type.h"
#include "tests/reduce/half_reference.h"
#include "tests/worker/cuda_worker_fixture.h"

namespace gradsync::daemon {
namespace {

using fakes::MachineWithGpus;
using ::testing::Each;
using ::testing::IsEmpty;

constexpr std::size_t kCount = 1003;  // not a multiple of a vector
constexpr std::size_t kBytes = kCount * sizeof(float);
constexpr std::size_t kSecondBucket = 4096;  // offset of the second bucket

std::vector<float> Filled(std::size_t count, float value) {
  return std::vector<float>(count, value);
}

ISOLATED_TEST(CudaLaunch, AveragesOverTheTrainersOfAGpu, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto first = worker.AddTrainer(kBytes, 1);
  const auto second = worker.AddTrainer(kBytes, 1);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const auto x = static_cast<float>(step);
    first->MarkReady(0, step, 0, Filled(kCount, x));
    second->MarkReady(0, step, 0, Filled(kCount, 3 * x));
    const auto done =
        worker.Launch(CudaWorkerFixture::LaunchOf({first.get(), second.get()}, step, kCount));
    for (FakeTrainer* const trainer : {first.get(), second.get()}) {
      trainer->WaitDone(0, step);
      EXPECT_THAT(trainer->Floats(0, kCount), Each(2 * x));
      EXPECT_EQ(trainer->Floats(kBytes, 1)[0], 0.0f);  // the verdict: complete
    }
    const auto reply = done->Get();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_DOUBLE_EQ(reply->launch_done().sum_of_squares(), kCount * 4.0 * x * x);
    EXPECT_EQ(reply->launch_done().non_finite(), 0u);
    EXPECT_FALSE(reply->launch_done().void_step());
    EXPECT_GE(reply->launch_done().finish_ns(), reply->launch_done().ready_ns());
  }
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaLaunch, TakesMoreLaunchesThanPiecesOfStaging, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  constexpr std::size_t kBuckets = 11;
  const auto first = worker.AddTrainer(kBuckets * 4096, kBuckets);
  const auto second = worker.AddTrainer(kBuckets * 4096, kBuckets);
  for (std::uint64_t step = 1; step <= 5; ++step) {
    std::vector<std::unique_ptr<PendingReply>> done;
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      const auto x = static_cast<float>(step * 100 + bucket);
      first->MarkReady(bucket, step, bucket * 4096, Filled(1024, x));
      second->MarkReady(bucket, step, bucket * 4096, Filled(1024, x + 2));
      auto launch = CudaWorkerFixture::LaunchOf({first.get(), second.get()}, step, 1024);
      launch.set_bucket(static_cast<std::uint32_t>(bucket));
      launch.set_offset(bucket * 4096);
      launch.set_step_buckets(kBuckets);
      launch.set_verdict_offset(kBuckets * 4096);
      done.push_back(worker.Launch(launch));
    }
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      first->WaitDone(bucket, step);
      EXPECT_THAT(first->Floats(bucket * 4096, 1024),
                  Each(static_cast<float>(step * 100 + bucket + 1)));
      EXPECT_TRUE(done[bucket]->Get().ok());
      second->WaitDone(bucket, step);
    }
  }
  EXPECT_TRUE(second->Released());
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

// The result has the same bits as between GPUs: the sum is made in float32, rounded once to 16
// bits, and scaled in float32.
ISOLATED_TEST(CudaLaunch, StagesFloatsInSixteenBits, MachineWithGpus(1)) {
  constexpr std::size_t kMost = 10007;  // several blocks
  CudaWorkerFixture worker;
  worker.Open();
  const auto first = worker.AddTrainer(kMost * sizeof(float), 1);
  const auto second = worker.AddTrainer(kMost * sizeof(float), 1);
  std::uint64_t step = 0;
  for (const DataType staging : {DataType::kBfloat16, DataType::kFloat16}) {
    const HalfFormat& format = staging == DataType::kFloat16 ? kFloat16Format : kBfloat16Format;
    for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{16}, kMost}) {
      std::vector<float> a(count), b(count), average(count);
      double sum_of_squares = 0;
      for (std::size_t i = 0; i < count; ++i) {
        a[i] = std::sin(static_cast<float>(i)) * 3;
        b[i] = std::cos(static_cast<float>(7 * i)) / 5;
      }
      a.back() = b.back() = 40000;  // their sum is out of float16's range
      for (std::size_t i = 0; i < count; ++i) {
        average[i] = static_cast<float>(HalfValue(format, NearestHalf(format, a[i] + b[i]))) * 0.5f;
        sum_of_squares += static_cast<double>(average[i]) * average[i];
      }
      first->MarkReady(0, ++step, 0, a);
      second->MarkReady(0, step, 0, b);
      auto launch = CudaWorkerFixture::LaunchOf({first.get(), second.get()}, step, count);
      launch.set_staging_data_type(static_cast<std::uint32_t>(staging));
      launch.set_verdict_offset(kMost * sizeof(float));
      const auto reply = worker.Launch(launch)->Get();
      ASSERT_TRUE(reply.ok()) << reply.status();
      for (FakeTrainer* const trainer : {first.get(), second.get()}) {
        EXPECT_EQ(trainer->Floats(0, count), average);
      }
      const worker::LaunchDone& done = reply->launch_done();
      EXPECT_FALSE(done.void_step());
      if (staging == DataType::kFloat16) {
        EXPECT_EQ(done.non_finite(), 1u);
      } else {
        EXPECT_EQ(done.non_finite(), 0u);
        EXPECT_NEAR(done.sum_of_squares(), sum_of_squares, sum_of_squares * 1e-12);
      }
    }
  }
  auto refused = CudaWorkerFixture::LaunchOf({first.get()}, ++step, 1);
  refused.set_staging_data_type(static_cast<std::uint32_t>(DataType::kFloat64));
  EXPECT_EQ(worker.Launch(refused)->Get().status().code(), absl::StatusCode::kInvalidArgument);
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

// Without another GPU, each trainer's bucket is read once and written once, by one kernel, which
// also writes the verdict.
ISOLATED_TEST(CudaLaunch, OneGpuMovesNoByteThroughStaging, MachineWithGpus(1)) {
  constexpr std::size_t kLarge = std::size_t{1} << 16;  // bytes
  constexpr std::size_t kReported = 1024;               // bytes of statistics and verdicts, at most
  CudaWorkerFixture worker;
  worker.Open();
  std::vector<std::unique_ptr<FakeTrainer>> trainers;
  std::vector<FakeTrainer*> all;
  for (int i = 0; i < 3; ++i) {
    trainers.push_back(worker.AddTrainer(kLarge, 1));
    all.push_back(trainers.back().get());
    all.back()->MarkReady(0, 1, 0, Filled(kLarge / sizeof(float), static_cast<float>(i)));
  }
  const auto launch = CudaWorkerFixture::LaunchOf(all, 1, kLarge / sizeof(float));
  EXPECT_FALSE(worker.Launch(launch)->Get()->launch_done().void_step());
  for (FakeTrainer* const trainer : all) {
    EXPECT_THAT(trainer->Floats(0, kLarge / sizeof(float)), Each(1.0f));
    EXPECT_EQ(trainer->Floats(kLarge, 1)[0], 0.0f);  // the verdict: complete
  }
  if (!worker.machine().fake()) return;
  const pid_t pid = worker.process().pid();
  EXPECT_EQ(worker.machine().Calls("cuLaunchKernel", pid), 1u);
  EXPECT_EQ(worker.machine().Calls("cuMemcpyAsync", pid), 0u);
  EXPECT_GE(worker.machine().KernelBytes(pid), 2 * all.size() * kLarge);
  EXPECT_LE(worker.machine().KernelBytes(pid), 2 * all.size() * kLarge + kReported);
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaLaunch, EnqueuesNothingBeforeEveryReadyWord, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto first = worker.AddTrainer(kBytes, 1);
  const auto second = worker.AddTrainer(kBytes, 1);
  const pid_t pid = worker.process().pid();
  first->MarkReady(0, 1, 0, Filled(kCount, 1));
  const auto done =
      worker.Launch(CudaWorkerFixture::LaunchOf({first.get(), second.get()}, 1, kCount));
  EXPECT_TRUE(first->Released());  // the stream has written its ready word
  for (int i = 0; i < 10; ++i) worker.Ping();
  EXPECT_FALSE(done->ComesWithin(std::chrono::milliseconds(0)));
  const fakes::FakeMachine& machine = worker.machine();
  if (machine.fake()) {
    EXPECT_EQ(machine.Calls("cuLaunchKernel", pid), 0u);
  }
  second->MarkReady(0, 1, 0, Filled(kCount, 2));
  EXPECT_TRUE(done->Get().ok());
  EXPECT_THAT(first->Floats(0, kCount), Each(1.5f));
  if (!machine.fake()) return;
  EXPECT_EQ(machine.Calls("cuLaunchKernel", pid), 1u);
  EXPECT_EQ(machine.Calls("cuStreamWaitValue64_v2", pid), 0u) << "only trainers' streams wait";
}

ISOLATED_TEST(CudaLaunch, AwaitReadyEnqueuesNothing, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto first = worker.AddTrainer(2 * kBytes, 2);
  const auto second = worker.AddTrainer(2 * kBytes, 2);
  const auto there = worker.AwaitReady({first.get(), second.get()}, 1, 0);
  const auto later = worker.AwaitReady({first.get(), second.get()}, 1, 1);
  first->WriteReady(0, 1);
  EXPECT_TRUE(first->Released());
  for (int i = 0; i < 10; ++i) worker.Ping();
  EXPECT_FALSE(there->ComesWithin(std::chrono::milliseconds(0)));
  second->WriteReady(0, 1);
  EXPECT_TRUE(there->Get().ok());
  worker.Ping();
  EXPECT_FALSE(later->ComesWithin(std::chrono::milliseconds(0)));
  second->WriteReady(1, 1);
  first->WriteReady(1, 1);
  EXPECT_TRUE(later->Get().ok());
  const pid_t pid = worker.process().pid();
  if (worker.machine().fake()) {
    EXPECT_EQ(worker.machine().Calls("cuLaunchKernel", pid), 0u);
  }
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

// Memory in use on the GPU. Other tests use a real GPU, too: there, the arenas that the worker
// counts.
std::size_t UsedBytes(CudaWorkerFixture& worker) {
  return worker.machine().fake() ? worker.machine().DeviceBytes(0) : worker.Memory().arena_bytes();
}

ISOLATED_TEST(CudaLaunch, AwaitReadyEndsForALostRankOrAGivenUpStep, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  const auto lost = worker.AddTrainer(kBytes, 1);
  const auto given_up = worker.AwaitReady({trainer.get(), lost.get()}, 1, 0);
  const auto next = worker.AwaitReady({trainer.get(), lost.get()}, 2, 0);
  worker::Call give_up;
  give_up.mutable_give_up_step()->set_layout(1);
  give_up.mutable_give_up_step()->set_step(1);
  EXPECT_TRUE(worker.Call(give_up).ok());
  EXPECT_TRUE(given_up->Get().ok());
  EXPECT_FALSE(next->ComesWithin(std::chrono::milliseconds(0)));
  const std::size_t before = UsedBytes(worker);
  lost->Unmap();
  EXPECT_TRUE(worker.Remove(*lost)->Get().ok());
  EXPECT_LT(UsedBytes(worker), before);  // the wait keeps nothing of the lost arena
  EXPECT_FALSE(next->ComesWithin(std::chrono::milliseconds(0)));
  trainer->WriteReady(0, 2);
  EXPECT_TRUE(next->Get().ok());
  const auto refused = worker.AwaitReady({trainer.get()}, 3, 1)->Get();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
}

ISOLATED_TEST(CudaLaunch, BeginsInTheOrderOfTheCalls, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(2 * kBytes, 2);
  auto launch = CudaWorkerFixture::LaunchOf({trainer.get()}, 1, 64);
  const auto first = worker.Launch(launch);
  launch.set_bucket(1);
  const auto second = worker.Launch(launch);
  trainer->WriteReady(1, 1);
  EXPECT_TRUE(trainer->Released());
  for (int i = 0; i < 10; ++i) worker.Ping();
  EXPECT_FALSE(second->ComesWithin(std::chrono::milliseconds(0)));
  trainer->WriteReady(0, 1);
  EXPECT_TRUE(second->Get().ok());
  EXPECT_TRUE(first->ComesWithin(std::chrono::milliseconds(0)));
}

ISOLATED_TEST(CudaLaunch, LostRankMakesTheStepVoid, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto survivor = worker.AddTrainer(2 * kSecondBucket, 2);
  const auto lost = worker.AddTrainer(2 * kSecondBucket, 2);
  const std::size_t before = UsedBytes(worker);
  auto launch = CudaWorkerFixture::LaunchOf({survivor.get(), lost.get()}, 1, kCount);
  launch.set_step_buckets(2);
  launch.set_verdict_offset(2 * kSecondBucket);
  survivor->MarkReady(0, 1, 0, Filled(kCount, 4));
  survivor->MarkReady(1, 1, kSecondBucket, Filled(kCount, 6));
  const auto first = worker.Launch(launch);
  EXPECT_TRUE(survivor->Released());
  lost->Unmap();
  EXPECT_TRUE(worker.Remove(*lost)->Get().ok());
  EXPECT_LT(UsedBytes(worker), before);  // nothing of the lost arena is kept
  // The lost rank's arena is removed before this launch.
  launch.set_bucket(1);
  launch.set_offset(kSecondBucket);
  const auto second = worker.Launch(launch);
  survivor->WaitDone(1, 1);
  EXPECT_TRUE(survivor->Released());
  EXPECT_TRUE(first->Get()->launch_done().void_step());
  EXPECT_TRUE(second->Get()->launch_done().void_step());
  EXPECT_EQ(survivor->Floats(2 * kSecondBucket, 1)[0], 1.0f);  // the verdict: void
  // The next step, without the lost rank, is complete.
  survivor->MarkReady(0, 2, 0, Filled(kCount, 8));
  auto next = CudaWorkerFixture::LaunchOf({survivor.get()}, 2, kCount);
  next.set_verdict_offset(2 * kSecondBucket);
  EXPECT_FALSE(worker.Launch(next)->Get()->launch_done().void_step());
  EXPECT_THAT(survivor->Floats(0, kCount), Each(8.0f));
  EXPECT_EQ(survivor->Floats(2 * kSecondBucket, 1)[0], 0.0f);
  worker.Stop();
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

ISOLATED_TEST(CudaLaunch, VoidStepStaysVoidToItsLastBucket, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(2 * kBytes, 2);
  trainer->WriteReady(0, 1);
  trainer->WriteReady(1, 1);
  auto launch = CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount);
  launch.set_void_contributions(1);
  launch.set_step_buckets(2);
  EXPECT_TRUE(worker.Launch(launch)->Get()->launch_done().void_step());
  launch.set_void_contributions(0);
  launch.set_bucket(1);
  EXPECT_TRUE(worker.Launch(launch)->Get()->launch_done().void_step());
  EXPECT_EQ(trainer->Floats(kBytes, 1)[0], 1.0f);
}

// Until then the trainer's own mark stays: void, for streams that poison releases.
ISOLATED_TEST(CudaLaunch, VerdictComesWithTheLastBucket, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(2 * kBytes, 2);
  const float mark = 7;
  std::vector<std::uint8_t> bytes(sizeof(mark));
  std::memcpy(bytes.data(), &mark, sizeof(mark));
  trainer->WriteBytes(2 * kBytes, bytes);
  trainer->WriteReady(0, 1);
  auto launch = CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount);
  launch.set_step_buckets(2);
  launch.set_verdict_offset(2 * kBytes);
  EXPECT_TRUE(worker.Launch(launch)->Get().ok());
  EXPECT_EQ(trainer->Floats(2 * kBytes, 1)[0], mark);
  trainer->WriteReady(1, 1);
  launch.set_bucket(1);
  EXPECT_TRUE(worker.Launch(launch)->Get().ok());
  EXPECT_EQ(trainer->Floats(2 * kBytes, 1)[0], 0.0f);
}

ISOLATED_TEST(CudaLaunch, SumsSixteenBitTypesInFloat32, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  std::vector<std::unique_ptr<FakeTrainer>> trainers;
  std::vector<FakeTrainer*> all;
  // More trainers than one launch of a kernel takes.
  for (int i = 0; i < 18; ++i) {
    trainers.push_back(worker.AddTrainer(kBytes, 1));
    all.push_back(trainers.back().get());
    // bfloat16: 256 for the first, 1 for the others. In bfloat16, 256 + 1 is 256.
    std::vector<std::uint8_t> halves(kCount * 2);
    for (std::size_t j = 0; j < kCount; ++j) {
      halves[2 * j] = 0x80;
      halves[2 * j + 1] = i == 0 ? 0x43 : 0x3f;
    }
    all.back()->WriteBytes(0, halves);
    all.back()->WriteReady(0, 1);
  }
  auto launch = CudaWorkerFixture::LaunchOf(all, 1, kCount);
  launch.set_data_type(static_cast<std::uint32_t>(DataType::kBfloat16));
  launch.set_scale(1);
  EXPECT_DOUBLE_EQ(worker.Launch(launch)->Get()->launch_done().sum_of_squares(),
                   kCount * 272.0 * 272.0);  // 273 rounds to 272 in bfloat16
  for (FakeTrainer* const trainer : all) {
    const auto bytes = trainer->Bytes(0, 2);
    EXPECT_EQ(bytes[0], 0x88);
    EXPECT_EQ(bytes[1], 0x43);
  }
}

ISOLATED_TEST(CudaLaunch, CountsNonFiniteValues, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  std::vector<float> gradients = Filled(kCount, 1);
  gradients[3] = std::numeric_limits<float>::quiet_NaN();
  gradients[kCount - 1] = std::numeric_limits<float>::infinity();
  trainer->MarkReady(0, 1, 0, gradients);
  const auto reply = worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount))->Get();
  EXPECT_EQ(reply->launch_done().non_finite(), 2u);
  EXPECT_FALSE(reply->launch_done().void_step());  // the trainer decides what to do
}

ISOLATED_TEST(CudaLaunch, RefusesBucketsOutsideTheArena, MachineWithGpus(1)) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  const auto refuses = [&](void (*spoil)(worker::Launch*)) {
    auto launch = CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount);
    spoil(&launch);
    return worker.Launch(launch)->Get().status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_bucket(1); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_count((1 << 20) - 1); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_count(1 << 30); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_offset(1 << 30); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_offset(4); }));  // not aligned
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_verdict_offset(1 << 30); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_verdict_offset(2); }));
  EXPECT_TRUE(refuses([](worker::Launch* launch) { launch->set_data_type(9); }));
}

// A machine on which every operation may start very late.
fakes::MachineDescription SlowMachine() {
  fakes::MachineDescription machine = MachineWithGpus(1);
  machine.max_delay_us = 10'000;
  return machine;
}

ISOLATED_TEST(CudaLaunch, ArenaIsZeroedBeforeTheTrainerGetsIt, SlowMachine()) {
  CudaWorkerFixture worker;
  worker.Open();
  for (int i = 0; i < 10; ++i) {
    const auto trainer = worker.AddTrainer(kBytes, 1);
    trainer->MarkReady(0, 1, 0, Filled(kCount, 5));
    EXPECT_THAT(trainer->Floats(0, kCount), Each(5.0f));
    EXPECT_TRUE(worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount))->Get().ok());
    EXPECT_THAT(trainer->Floats(0, kCount), Each(5.0f));
  }
}

ISOLATED_TEST(CudaLaunch, StopFinishesLaunchesOnTheGpu, SlowMachine()) {
  CudaWorkerFixture worker;
  worker.Open();
  const auto trainer = worker.AddTrainer(kBytes, 1);
  trainer->MarkReady(0, 1, 0, Filled(kCount, 5));
  const auto done = worker.Launch(CudaWorkerFixture::LaunchOf({trainer.get()}, 1, kCount));
  trainer->WaitDone(0, 1);
  const pid_t pid = worker.process().pid();
  while (worker.machine().Calls("cuLaunchKernel", pid) == 0) worker.Ping();
  worker.Stop();
  EXPECT_TRUE(done->Get().ok()) << done->Get().status();
  EXPECT_TRUE(trainer->Released());
  EXPECT_THAT(worker.machine().Violations(), IsEmpty());
}

}  // namespace
}  // namespace gradsync::daemon
