// Experiment (b): do kernels of two processes on one GPU run at the same time?
//
// The second process runs long kernels that leave most of the GPU free, one behind the other. The
// first process runs a short kernel again and again, and measures until it ends: first alone, then
// beside the other process. A process that has to wait for its turn waits for a time slice, which
// is many times as long as the kernel. Run it without and with MPS, which it detects.
//
// holds: beside, the median is at most kShared times as long with MPS, and longer than that
// without. Docs and code assume this (gate `auto`).
//
// Also says how much slower the long kernels are beside each other. That is no proof of turns: two
// kernels at the same time share multiprocessors and memory.

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_load.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::uint32_t kBlocks = 8;                            // an H200 has 132 processors
constexpr std::uint64_t kLongFloats = std::uint64_t{4} << 20;   // about a millisecond
constexpr std::uint64_t kShortFloats = std::uint64_t{4} << 10;  // some 10 us
constexpr double kMeasureMs = 300;                              // many time slices
constexpr int kRounds = 5;                                      // the median counts
constexpr int kShortKernels = 200;                              // of a round
constexpr double kShared = 4;

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

// Adds the microseconds of each short kernel, from its launch until it has ended.
void TimeShortKernels(CudaLoad* load, std::vector<double>* us) {
  for (int i = 0; i < kShortKernels; ++i) us->push_back(load->TimeMs(1) * 1e3);
}

void Trainer(const Line& first) {
  fakes::EnterContext();
  CudaLoad load(kBlocks, kLongFloats);
  first.Send("there");
  while (first.Receive().has_value()) {
    first.Send("works");
    // Works until the next message arrives.
    while (!first.Receive(0).has_value()) CUDA_OK(load.RunFor(1));
    first.Send("rests");
  }
}

Answer Ask() {
  fakes::EnterContext();
  const bool mps = UnderMps();
  Fact("mps", mps);
  CudaLoad long_load(kBlocks, kLongFloats);
  CudaLoad short_load(kBlocks, kShortFloats);
  OtherProcess trainer("trainer");
  trainer.line().Expect("there");
  long_load.TimeMs(1);
  short_load.TimeMs(1);
  const int kernels = std::clamp(static_cast<int>(kMeasureMs / long_load.TimeMs(1)), 1, 100'000);
  std::vector<double> alone_us, beside_us, slower;
  for (int round = 0; round < kRounds; ++round) {
    TimeShortKernels(&short_load, &alone_us);
    const double alone_ms = long_load.TimeMs(kernels);
    trainer.line().Send("work");
    trainer.line().Expect("works");
    TimeShortKernels(&short_load, &beside_us);
    slower.push_back(long_load.TimeMs(kernels) / alone_ms);
    trainer.line().Send("rest");
    trainer.line().Expect("rests");
  }
  const double alone = Quantile(alone_us, 0.5);
  const double beside = Quantile(beside_us, 0.5);
  Fact("short_kernel_alone_us_p50", alone);
  Fact("short_kernel_beside_us_p50", beside);
  Fact("short_kernel_beside_us_p99", Quantile(beside_us, 0.99));
  Fact("long_kernels_beside_times_as_long", Quantile(slower, 0.5));
  if (mps && beside > kShared * alone) {
    return {Answer::Kind::kDoesNotHold, "with MPS the processes still take turns"};
  }
  if (!mps && beside <= kShared * alone) {
    return {Answer::Kind::kDoesNotHold, "without MPS the processes overlap"};
  }
  return {};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"trainer", Trainer}}, Ask);
}
