// Experiment (f): does a worker survive when a busy trainer on the same MPS server gets SIGKILL?
// NVIDIA's guide does not support this. The product must expect that the worker fails too.
//
// The first process is the worker. Its kernels run beside those of a trainer, which is busy all the
// time until it is killed. Then a new trainer starts.
//
// holds: the worker's kernels continue without an error, and MPS accepts the new trainer.
// does not hold: the worker or the new trainer failed. The answer says which, and how.
// not available: this process is not a client of MPS.

#include <cuda.h>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_load.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::uint32_t kBlocks = 8;
constexpr std::uint64_t kFloats = std::uint64_t{4} << 20;
constexpr double kAfterMs = 1000;

void Trainer(const Line& first) {
  fakes::EnterContext();
  CudaLoad load(kBlocks, kFloats);
  first.Send("busy");
  for (;;) CUDA_OK(load.RunFor(100));
}

void Newcomer(const Line& first) {
  fakes::EnterContext();
  CudaLoad load(kBlocks, kFloats);
  first.Send(load.RunFor(10) == CUDA_SUCCESS ? "let in" : "cannot work");
}

std::string NameOf(CUresult result) {
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  return name == nullptr ? "an unknown error" : name;
}

Answer Ask() {
  fakes::EnterContext();
  if (!UnderMps()) return {Answer::Kind::kNotAvailable, "no client of MPS"};
  CudaLoad worker(kBlocks, kFloats);
  OtherProcess trainer("trainer");
  trainer.line().Expect("busy");
  CUDA_OK(worker.RunFor(100));
  trainer.Kill();
  const CUresult result = worker.RunFor(kAfterMs);
  Fact("worker", NameOf(result));
  OtherProcess newcomer("newcomer");
  const std::optional<Message> answer = newcomer.line().Receive();
  Fact("newcomer", answer.has_value() ? answer->text : "ended without an answer");
  if (result != CUDA_SUCCESS) {
    return {Answer::Kind::kDoesNotHold, "the worker's context died with the trainer"};
  }
  if (!answer.has_value() || answer->text != "let in") {
    return {Answer::Kind::kDoesNotHold, "no new trainer is let in"};
  }
  return {};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"trainer", Trainer}, {"newcomer", Newcomer}}, Ask);
}
