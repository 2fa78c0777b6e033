// Experiment (e): do stream memory operations work on host words that two processes have
// registered? Run it without MPS and with MPS. It detects MPS itself.
//
// A trainer's stream waits for word 0 and then writes word 1. The first process releases the stream
// in three ways: its own stream writes word 0, its CPU stores a step, or its CPU stores the poison
// value that surviving clients store.
//
// holds: each of the three releases the trainer, and the CPU sees the trainer's write.

#include <cuda.h>

#include "proto/gradsync/shared_memory.h"
#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_load.h"
#include "tests/gpu/cuda_words.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::uint64_t kSteps = 3;

void Trainer(const Line& first) {
  fakes::EnterContext();
  const Message page = first.Expect("page");
  CudaWords words(page.descriptor.get());
  CUstream stream = fakes::MakeStream();
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    CUDA_OK(cuStreamWaitValue64(stream, words.address(0), step, CU_STREAM_WAIT_VALUE_GEQ));
    CUDA_OK(cuStreamWriteValue64(stream, words.address(1), step, CU_STREAM_WRITE_VALUE_DEFAULT));
  }
  first.Send(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY ? "parked" : "not parked");
  first.Receive();
}

Answer Ask() {
  fakes::EnterContext();
  Fact("mps", UnderMps());
  CudaWords words;
  CUstream stream = fakes::MakeStream();
  OtherProcess trainer("trainer");
  trainer.line().Send("page", words.descriptor());
  trainer.line().Expect("parked");
  const auto released = [&words](const char* by, std::uint64_t step) {
    const double begin = NowMs();
    const bool seen = Await([&] { return words.word(1).load() == step; });
    Fact(std::string("released_by_") + by, seen);
    if (seen) Fact(std::string("until_seen_us_") + by, (NowMs() - begin) * 1e3);
    return seen;
  };
  CUDA_OK(cuStreamWriteValue64(stream, words.address(0), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
  const bool by_stream = released("another_process_stream", 1);
  words.word(0).store(2);
  const bool by_cpu = released("cpu", 2);
  words.word(0).store(kPoison + 3);
  const bool by_poison = released("poison", 3);
  if (by_stream && by_cpu && by_poison) return {};
  return {Answer::Kind::kDoesNotHold, "a stream stayed parked, or its write was not seen"};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"trainer", Trainer}}, Ask);
}
