// Trainers on GPUs that send, request or write something wrong. They get a clear error. The other
// ranks continue, or get an error that names the wrong rank.

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/include/gradsync/client.h"
#include "tests/cuda/cuda_node.h"
#include "tests/cuda/cuda_rank.h"
#include "tests/cuda/cuda_raw_rank.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"

namespace gradsync {
namespace {

using fakes::GpuUuid;
using fakes::kMebibyte;
using fakes::MachineDescription;
using fakes::MachineWithGpus;
using testing::Each;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

constexpr std::size_t kBuckets = CudaNode::kBuckets;
constexpr std::size_t kCount = CudaNode::kCount;
// Long enough for a complete step, even on a busy machine. Each test waits for it several times.
constexpr int kStepTimeoutMs = kScale == 1 ? 3000 : 5000;
const absl::Duration kStepTimeout = absl::Milliseconds(kStepTimeoutMs);

// Rank 0 uses the library; rank 1, on the last GPU, is raw. Their layout is ready.
struct HalfRawJob {
  explicit HalfRawJob(int gpus = 1) : node(gpus) {
    std::thread other([this, gpus] {
      EXPECT_TRUE(raw.Join(1, 2, GpuUuid(gpus - 1), kBuckets, kCount, kStepTimeoutMs));
    });
    const absl::Status joined = rank.Join(node.Options(0, 2, kStepTimeout));
    EXPECT_TRUE(joined.ok()) << joined;
    const absl::Status registered = rank.Register(CudaLayout(0, kBuckets, kCount));
    EXPECT_TRUE(registered.ok()) << registered;
    other.join();
  }

  // Runs rank 0's step with `value`, and sends rank 1's messages. Does not write the words that
  // rank 1's GPU would write.
  void Begin(std::uint64_t step, float value) {
    const absl::Status begun = rank.Step(step, value);
    EXPECT_TRUE(begun.ok()) << begun;
    EXPECT_TRUE(raw.SayEnd(step, /*ready_rest=*/true));
  }
  void WriteReady(std::uint64_t word) {
    for (std::size_t i = 0; i < kBuckets; ++i) raw.semaphore(i).ready.store(word);
  }
  // Expects the step to be void, with an error that says that rank 1's GPU did not write its words.
  void ExpectTimeout(std::uint64_t step) {
    const absl::Status why = rank.WaitStep(step).status();
    EXPECT_EQ(why.code(), absl::StatusCode::kDeadlineExceeded) << why;
    EXPECT_EQ(ErrorReason(why), "STEP_TIMEOUT");
    EXPECT_EQ(ErrorField(why, field::kRank), "1");
    EXPECT_EQ(ErrorField(why, field::kBucket), "0");
    EXPECT_THAT(std::string(why.message()),
                HasSubstr("rank 1 has marked bucket 0-1 ready, but its GPU has not written it"));
    EXPECT_EQ(rank.Verdict(step), 1);
    const auto other = raw.AwaitStep();
    ASSERT_TRUE(other.has_value());
    EXPECT_EQ(other->reason, "STEP_TIMEOUT") << *other;
  }
  // Expects the step to be complete, with rank 1's gradients as they are: zeros if it wrote none.
  void ExpectAverage(std::uint64_t step, float value) {
    const auto result = rank.WaitStep(step);
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(rank.Verdict(step), 0);
    EXPECT_THAT(rank.Read(0), Each(value));
    const auto other = raw.AwaitStep();
    ASSERT_TRUE(other.has_value());
    EXPECT_EQ(other->code, 0) << *other;
  }

  CudaNode node;
  CudaRank rank{0};
  CudaRawRank raw{node.daemon().socket(), node.daemon().side_socket()};
};

void NeverWritesOnce(int gpus) {
  HalfRawJob job(gpus);
  job.Begin(1, 4);
  job.ExpectTimeout(1);
  // In the next step rank 1's words arrive.
  job.Begin(2, 8);
  job.WriteReady(2);
  job.ExpectAverage(2, 4);
  EXPECT_EQ(job.node.Workers(), static_cast<std::uint64_t>(gpus));
}

ISOLATED_TEST(CudaBadInput, MissingReadyWordVoidsTheStep, MachineWithGpus(1)) {
  NeverWritesOnce(1);
}

ISOLATED_TEST(CudaBadInput, MissingReadyWordOnAnotherGpuVoidsTheStep, MachineWithGpus(2)) {
  NeverWritesOnce(2);
}

// Rank 0's gradients are zero, and rank 1 writes none. So the average of a complete step is zero.
ISOLATED_TEST(CudaBadInput, GarbageInReadyWordsCompletesOrVoidsTheStep, MachineWithGpus(1)) {
  HalfRawJob job;
  std::uint64_t step = 1;
  const auto counts = [&](std::uint64_t word) {
    job.WriteReady(word);
    job.Begin(step, 0);
    job.ExpectAverage(step++, 0);
  };
  const auto does_not_count = [&](std::uint64_t word) {
    job.WriteReady(word);
    job.Begin(step, 0);
    job.ExpectTimeout(step++);
  };
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  counts(step);
  counts(step + 1'000'000);      // a step far ahead
  counts(kPoison + step);        // poison has a meaning only in done words
  counts(step + kHalf - 1);      // the last step that counts as ahead
  does_not_count(step + kHalf);  // the first step that counts as behind
  does_not_count(step - 1);
  does_not_count(~std::uint64_t{0});
  counts(step);
}

ISOLATED_TEST(CudaBadInput, GarbageInOtherWordsHurtsNoOtherRank, MachineWithGpus(1)) {
  HalfRawJob job;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    job.raw.header().void_step.store(step);
    for (std::size_t i = 0; i < kBuckets; ++i) {
      job.raw.semaphore(i).done.store(step == 1 ? kPoison : step + 5);
    }
    job.WriteReady(step);
    job.Begin(step, 0);
    job.ExpectAverage(step, 0);
    EXPECT_EQ(job.raw.semaphore(1).done.load(), step) << "written by the GPU";
  }
}

ISOLATED_TEST(CudaBadInput, RefusalOfAMissingDeviceNamesIt, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank rank(0);
  CudaRawRank raw(node.daemon().socket(), node.daemon().side_socket());
  ASSERT_TRUE(rank.Join(node.Options(0, 2)).ok());
  ASSERT_TRUE(raw.Open(1, 2));
  const std::pair<const char*, const char*> devices[] = {
      {"GPU-99999999-0000-0000-0000-000000000000", "GPU_NOT_VISIBLE"},
      {"MIG-99999999-0000-0000-0000-000000000000", "GPU_NOT_VISIBLE"},
      {"cuda:0", "MALFORMED"},
  };
  for (const auto& [device, reason] : devices) {
    ASSERT_TRUE(raw.RequestLayout(device, kBuckets, kCount));
    const auto refused = raw.AwaitRefusal();
    ASSERT_TRUE(refused.has_value());
    EXPECT_EQ(refused->reason, reason) << *refused;
    EXPECT_THAT(refused->message, HasSubstr(device));
    const absl::Status told = rank.Register(CudaLayout(0, kBuckets, kCount));
    EXPECT_EQ(ErrorReason(told), "LAYOUT_REFUSED") << told;
    EXPECT_EQ(ErrorField(told, field::kRank), "1");
    node.ExpectNothingKept();
  }
}

MachineDescription SmallMachine() {
  MachineDescription machine = MachineWithGpus(1);
  machine.gpus[0].memory_bytes = 2 * machine.context_bytes + 32 * kMebibyte;
  return machine;
}

// Makes the same call on both ranks at once and returns both results.
std::vector<absl::Status> Both(CudaRank& first, CudaRank& second,
                               absl::Status (CudaRank::*call)(const LayoutSpec&),
                               const LayoutSpec& spec) {
  std::vector<absl::Status> told(2);
  std::thread other([&] { told[1] = (second.*call)(spec); });
  told[0] = (first.*call)(spec);
  other.join();
  return told;
}
std::vector<absl::Status> RegisterBoth(CudaRank& first, CudaRank& second, const LayoutSpec& spec) {
  return Both(first, second, &CudaRank::Register, spec);
}

// Expects that one rank lacked GPU memory, and that the other rank's error names that rank.
void ExpectRefused(const std::vector<absl::Status>& told) {
  std::vector<std::string> reasons;
  for (const absl::Status& status : told) reasons.push_back(ErrorReason(status));
  EXPECT_THAT(reasons, UnorderedElementsAre("GPU_OUT_OF_MEMORY", "LAYOUT_REFUSED"));
  const std::string refused = reasons[0] == "GPU_OUT_OF_MEMORY" ? "0" : "1";
  for (const absl::Status& status : told) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bytes of the GPU, which has"));
    EXPECT_EQ(ErrorField(status, field::kJob), "job");
    EXPECT_EQ(ErrorField(status, field::kRank), refused);
  }
}

constexpr std::size_t Floats(std::size_t mebibytes) {
  return mebibytes * kMebibyte / sizeof(float);
}

ISOLATED_TEST(CudaBadInput, LayoutLargerThanTheDeviceIsRefused, SmallMachine()) {
  CudaNode node;
  CudaRank first(0), second(0);
  ASSERT_TRUE(first.Join(node.Options(0, 2)).ok());
  ASSERT_TRUE(second.Join(node.Options(1, 2)).ok());
  // At first one of the two arenas fits. Then none fits.
  for (const std::size_t mebibytes : {20, 40}) {
    ExpectRefused(RegisterBoth(first, second, CudaLayout(0, mebibytes * 16, Floats(1) / 16)));
    node.ExpectNothingKept();
  }
  // A layout that fits still works.
  for (const absl::Status& status : RegisterBoth(first, second, CudaLayout(0, kBuckets, kCount))) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (CudaRank* rank : {&first, &second}) EXPECT_TRUE(rank->Step(1, 2).ok());
  for (CudaRank* rank : {&first, &second}) EXPECT_TRUE(rank->WaitStep(1).ok());
  EXPECT_EQ(node.Workers(), 1u);
}

// The old layout continues, and the refused one leaves nothing behind.
ISOLATED_TEST(CudaBadInput, ReplacementLargerThanTheDeviceIsRefused, SmallMachine()) {
  CudaNode node;
  CudaRank first(0), second(0);
  ASSERT_TRUE(first.Join(node.Options(0, 2)).ok());
  ASSERT_TRUE(second.Join(node.Options(1, 2)).ok());
  for (const absl::Status& status : RegisterBoth(first, second, CudaLayout(0, kBuckets, kCount))) {
    ASSERT_TRUE(status.ok()) << status;
  }
  const std::size_t before = node.machine().DeviceBytes(0);
  std::uint64_t step = 0;
  const auto expect_step = [&] {
    ++step;
    for (CudaRank* rank : {&first, &second}) EXPECT_TRUE(rank->Step(step, 2).ok());
    for (CudaRank* rank : {&first, &second}) {
      EXPECT_TRUE(rank->WaitStep(step).ok());
      EXPECT_THAT(rank->Read(1), Each(3.0f));
    }
  };
  const LayoutSpec refused[] = {
      CudaLayout(0, 20 * 16, Floats(1) / 16),  // one arena fits
      CudaLayout(0, 40 * 16, Floats(1) / 16),  // no arena fits
      CudaLayout(0, 1, Floats(20)),            // staging does not fit
  };
  for (const LayoutSpec& spec : refused) {
    expect_step();
    ExpectRefused(Both(first, second, &CudaRank::Replace, spec));
    EXPECT_TRUE(node.machine().AwaitDeviceBytes(0, before, kPatienceMs));
  }
  // Makes the allocation of an arena fail, then that of staging.
  const std::pair<const char*, LayoutSpec> taken[] = {
      {"cuMemCreate 1", CudaLayout(0, 3, kCount)},
      {"cuMemAlloc_v2 1+", CudaLayout(0, 1, Floats(1))},
  };
  for (const auto& [call, spec] : taken) {
    expect_step();
    node.machine().Inject(std::string(call) +
                          " error 2 pid=" + std::to_string(node.WorkerPids()[0]));
    ExpectRefused(Both(first, second, &CudaRank::Replace, spec));
    EXPECT_TRUE(node.machine().AwaitDeviceBytes(0, before, kPatienceMs));
    node.machine().ClearFaults();
  }
  expect_step();
  for (const auto& status : Both(first, second, &CudaRank::Replace, CudaLayout(0, 3, kCount))) {
    EXPECT_TRUE(status.ok()) << status;
  }
  expect_step();
  EXPECT_EQ(node.Workers(), 1u);
}

ISOLATED_TEST(CudaBadInput, DestroyedStreamFailsOnlyLaterCalls, MachineWithGpus(1)) {
  CudaNode node;
  CudaRank first(0), second(0);
  ASSERT_TRUE(first.Join(node.Options(0, 2)).ok());
  ASSERT_TRUE(second.Join(node.Options(1, 2)).ok());
  for (const absl::Status& status : RegisterBoth(first, second, CudaLayout(0, kBuckets, kCount))) {
    ASSERT_TRUE(status.ok()) << status;
  }
  // One stream is destroyed after its call, one while it is parked. The step needs neither.
  second.Enter();
  CUstream early = fakes::MakeStream();
  CUstream parked = fakes::MakeStream();
  ASSERT_TRUE(first.Step(1, 0).ok());
  ASSERT_TRUE(second.layout().FinishStep(1, {}, {early}).ok());
  ASSERT_TRUE(second.layout().WaitOnStream(1, parked).ok());
  CUDA_OK(cuStreamDestroy(early));
  CUDA_OK(cuStreamDestroy(parked));
  for (CudaRank* rank : {&first, &second}) {
    const auto result = rank->WaitStep(1);
    EXPECT_TRUE(result.ok()) << result.status();
  }
  // A call with a destroyed stream fails. The rank can still abandon the step.
  ASSERT_TRUE(first.Step(2, 0).ok());
  node.ExpectViolation("a stream that does not exist (any more) is used");
  const absl::Status refused = second.layout().MarkReady(2, 0, {early});
  EXPECT_EQ(ErrorReason(refused), "BAD_STREAM") << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank 1, step 2, bucket 0"));
  ASSERT_TRUE(second.layout().AbandonStep(2, "its stream was destroyed").ok());
  for (CudaRank* rank : {&first, &second}) {
    const absl::Status abandoned = rank->WaitStep(2).status();
    EXPECT_EQ(ErrorReason(abandoned), "STEP_ABANDONED") << abandoned;
    EXPECT_EQ(ErrorField(abandoned, field::kRank), "1");
  }
  EXPECT_EQ(first.Verdict(2), 1);
  for (CudaRank* rank : {&first, &second}) ASSERT_TRUE(rank->Step(3, 3).ok());
  for (CudaRank* rank : {&first, &second}) {
    EXPECT_THAT(rank->Read(0), Each(3.0f));
    EXPECT_TRUE(rank->WaitStep(3).ok());
  }
}

}  // namespace
}  // namespace gradsync
