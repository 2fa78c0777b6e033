// Experiment (a): does a client's mapping survive SIGKILL of its worker and daemon, and does a
// worker survive SIGKILL of its client during a reduction?
//
// First part: a worker exports memory, a daemon passes the descriptor on, and a client (the first
// process) maps it. Then worker and daemon are killed. Second part: now the first process is the
// worker. Its client is killed while it writes its arena and the worker's kernels read the arena.
//
// holds: the client's mapping keeps its content and accepts new writes, though no other reference
// to the memory is left. The worker's kernels end without an error, with the sum of the arena's
// content, and its context accepts new work.

#include <cuda.h>
#include <unistd.h>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_load.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::size_t kBytes = std::size_t{16} << 20;  // a multiple of every granularity
constexpr std::size_t kFloats = kBytes / sizeof(float);
constexpr std::uint32_t kBlocks = 64;
constexpr std::uint32_t kSeven = 0x40E00000;  // 7.0f
constexpr std::uint32_t kNine = 0x41100000;   // 9.0f

int Export(const fakes::Mapped& memory) {
  int descriptor = -1;
  CUDA_OK(cuMemExportToShareableHandle(&descriptor, memory.handle,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  return descriptor;
}

fakes::Mapped Import(int descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  CUDA_OK(cuMemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return fakes::MapHandle(handle, kBytes);
}

void Fill(const fakes::Mapped& memory, std::uint32_t bits, CUstream stream) {
  CUDA_OK(cuMemsetD32Async(memory.address, bits, kFloats, stream));
  CUDA_OK(cuStreamSynchronize(stream));
}

void Worker(const Line& first) {
  fakes::EnterContext();
  const fakes::Mapped memory = fakes::MakeMapped(kBytes);
  Fill(memory, kSeven, fakes::MakeStream());
  const Descriptor descriptor(Export(memory));
  first.Send("arena", descriptor.get());
  first.Receive();  // until it is killed
}

void Daemon(const Line& first) {
  const Message arena = first.Expect("arena");
  first.Send("arena", arena.descriptor.get());
  first.Receive();
}

void Client(const Line& first) {
  fakes::EnterContext();
  const Message arena = first.Expect("arena");
  const fakes::Mapped memory = Import(arena.descriptor.get());
  CUstream stream = fakes::MakeStream();
  Fill(memory, kSeven, stream);
  first.Send("mapped");
  for (;;) Fill(memory, kSeven, stream);
}

Answer AskClient() {
  OtherProcess worker("worker");
  OtherProcess daemon("daemon");
  {
    const Message arena = worker.line().Expect("arena");
    daemon.line().Send("arena", arena.descriptor.get());
  }
  fakes::EnterContext();
  CUstream stream = fakes::MakeStream();
  fakes::Mapped memory;
  {
    const Message arena = daemon.line().Expect("arena");
    memory = Import(arena.descriptor.get());
    CUDA_OK(cuMemRelease(memory.handle));  // only the mapping is left
  }
  worker.Kill();
  daemon.Kill();
  const float kept = fakes::ReadFloats(memory.address + kBytes - sizeof(float), 1, stream)[0];
  Fact("kept_after_kill", kept == 7);
  Fill(memory, kNine, stream);
  const float written = fakes::ReadFloats(memory.address, 1, stream)[0];
  Fact("writable_after_kill", written == 9);
  fakes::Unmap(memory);
  if (kept != 7 || written != 9) {
    return {Answer::Kind::kDoesNotHold, "a mapping changed when its worker was killed"};
  }
  return {};
}

Answer AskWorker() {
  const fakes::Mapped memory = fakes::MakeMapped(kBytes);
  CudaLoad reduction(kBlocks, kFloats, memory.address);
  OtherProcess client("client");
  {
    const Descriptor descriptor(Export(memory));
    client.line().Send("arena", descriptor.get());
  }
  client.line().Expect("mapped");
  CUDA_OK(reduction.Enqueue());
  client.Kill();  // the kernel reads what the client writes
  const CUresult during = reduction.RunFor(200);
  Fact("kernels_beside_the_kill", static_cast<int>(during));
  if (during != CUDA_SUCCESS) {
    return {Answer::Kind::kDoesNotHold, "the worker's kernels failed when its client was killed"};
  }
  const float sum = reduction.Sum();
  Fact("sum", sum);
  CUDA_OK(cuMemsetD32Async(memory.address, kNine, kFloats, nullptr));
  CUDA_OK(cuStreamSynchronize(nullptr));
  const CUresult after = reduction.RunFor(10);
  const bool right = sum == 14 && after == CUDA_SUCCESS && reduction.Sum() == 18;
  Fact("context_takes_new_work", right);
  if (!right) return {Answer::Kind::kDoesNotHold, "the arena or the context was damaged"};
  return {};
}

Answer Ask() {
  const Answer client = AskClient();
  const Answer worker = AskWorker();
  return client.kind == Answer::Kind::kHolds ? worker : client;
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"worker", Worker}, {"daemon", Daemon}, {"client", Client}},
                       Ask);
}
