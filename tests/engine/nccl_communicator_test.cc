// NcclCommunicator on a fake NCCL. tests/worker tests how workers use it.

#include "daemon/engine/nccl_communicator.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>
#include <vector>

#include "daemon/cuda/nccl_library.h"
#include "tests/fakes/cuda_process.h"
#include "tests/fakes/isolated_test.h"

namespace gradsync::daemon {
namespace {

using fakes::MachineWithGpus;

constexpr std::size_t kCount = 1000;

void Settle(NcclCommunicator* communicator) {
  absl::StatusOr<bool> settled = false;
  while (settled.ok() && !*settled) settled = communicator->Settled();
  EXPECT_TRUE(settled.ok()) << settled.status();
}

// Rank 0 of two communicators waits for ranks that launch nothing, with both kernels on one stream.
// Freeing one communicator waits for the kernel of the other one, unless that has been aborted too.
ISOLATED_TEST(NcclCommunicator, AbortFlagsAllBeforeItFreesAny, MachineWithGpus(2)) {
  const auto nccl = NcclLibrary::Open("tests/fakes/nccl/libnccl.so.2");
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  CUcontext here = fakes::EnterContext(0);
  CUcontext there = fakes::EnterContext(1);
  std::vector<std::unique_ptr<NcclCommunicator>> mine, others;
  for (int i = 0; i < 2; ++i) {
    NcclCommunicatorOptions options;
    options.unique_id = *NcclCommunicator::NewUniqueId(nccl->get());
    options.ranks = 2;
    CUDA_OK(cuCtxSetCurrent(here));
    mine.push_back(*NcclCommunicator::Connect(nccl->get(), options));
    options.rank = 1;
    CUDA_OK(cuCtxSetCurrent(there));
    others.push_back(*NcclCommunicator::Connect(nccl->get(), options));
  }
  for (const auto* const all : {&mine, &others}) {
    for (const auto& communicator : *all) Settle(communicator.get());
  }
  CUDA_OK(cuCtxSetCurrent(here));
  CUstream stream = fakes::MakeStream();
  const CUdeviceptr data = fakes::MakeFloats(kCount);
  // The communicator that is freed first has the last kernel of the stream.
  for (NcclCommunicator* const communicator : {mine[1].get(), mine[0].get()}) {
    ASSERT_TRUE(communicator->AllReduce(data, DataType::kFloat32, kCount, stream).ok());
    Settle(communicator);
  }
  NcclCommunicator::Abort(mine);
  CUDA_OK(cuStreamSynchronize(stream));
  CUDA_OK(cuCtxSetCurrent(there));
  NcclCommunicator::Abort(others);
}

}  // namespace
}  // namespace gradsync::daemon
