// Experiment (b): do kernels of two processes on one GPU run at the same time?
//
// The first process times kernels that leave most of the GPU free: first alone, then while another
// process runs the same kernels all the time. Run it without and with MPS, which it detects.
//
// overlap = 2 * alone / beside - 1: 1 if each process is as fast as alone, 0 if they take turns.
// holds: the overlap is at least 0.7 with MPS, and at most 0.3 without. Docs and code assume this.

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_load.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::uint32_t kBlocks = 8;                       // an H200 has 132 processors
constexpr std::uint64_t kFloats = std::uint64_t{4} << 20;  // long kernels: no gap between them
constexpr double kMeasureMs = 300;                         // many time slices
constexpr int kRounds = 5;                                 // the median counts
constexpr double kShared = 0.7;
constexpr double kInTurns = 0.3;

void Trainer(const Line& first) {
  fakes::EnterContext();
  CudaLoad load(kBlocks, kFloats);
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
  CudaLoad load(kBlocks, kFloats);
  OtherProcess trainer("trainer");
  trainer.line().Expect("there");
  load.TimeMs(1);
  const int kernels = std::clamp(static_cast<int>(kMeasureMs / load.TimeMs(1)), 1, 100'000);
  std::vector<double> overlaps;
  for (int round = 0; round < kRounds; ++round) {
    const double alone_ms = load.TimeMs(kernels);
    trainer.line().Send("work");
    trainer.line().Expect("works");
    const double beside_ms = load.TimeMs(kernels);
    trainer.line().Send("rest");
    trainer.line().Expect("rests");
    overlaps.push_back(2 * alone_ms / beside_ms - 1);
    Fact("alone_ms", alone_ms);
    Fact("beside_ms", beside_ms);
  }
  std::sort(overlaps.begin(), overlaps.end());
  const double overlap = overlaps[kRounds / 2];
  Fact("overlap", overlap);
  if (mps && overlap < kShared) {
    return {Answer::Kind::kDoesNotHold, "with MPS the processes still take turns"};
  }
  if (!mps && overlap > kInTurns) {
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
