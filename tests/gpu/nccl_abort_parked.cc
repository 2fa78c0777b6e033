// Experiment (c): can a worker abort its NCCL communicator while trainers' streams are parked?
//
// A trainer's stream waits for a word, as it does for an average. The first process is the worker.
// It makes a nonblocking communicator like the product's, with world size 1, does an all-reduce and
// aborts the communicator.
//
// holds: the abort returns while the trainer is parked, and the word then releases the trainer.

#include <cuda.h>
#include <nccl.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_words.h"
#include "tests/gpu/experiment.h"

namespace gradsync::gpu {
namespace {

constexpr std::size_t kCount = 1 << 20;

void Trainer(const Line& first) {
  fakes::EnterContext();
  const Message page = first.Expect("page");
  CudaWords words(page.descriptor.get());
  CUstream stream = fakes::MakeStream();
  CUDA_OK(cuStreamWaitValue64(stream, words.address(0), 1, CU_STREAM_WAIT_VALUE_GEQ));
  first.Send(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY ? "parked" : "not parked");
  first.Expect("released");
  const bool released = Await([&] { return cuStreamQuery(stream) == CUDA_SUCCESS; });
  first.Send(released ? "goes on" : "hangs");
  first.Receive();
}

// Polls until the communicator is not in progress. ncclInProgress if that takes too long.
ncclResult_t Settled(ncclComm_t communicator) {
  ncclResult_t state = ncclInProgress;
  Await([&] {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    if (asked != ncclSuccess) state = asked;
    return state != ncclInProgress;
  });
  return state;
}

// Aborts as the product does (nccl_communicator.cc): within a group, NCCL sets the communicator's
// flag at once and frees its memory at the end of the group.
ncclResult_t AbortInGroup(ncclComm_t communicator) {
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  result = ncclCommAbort(communicator);
  const ncclResult_t ended = ncclGroupEnd();
  return result != ncclSuccess ? result : ended;
}

Answer Ask() {
  fakes::EnterContext();
  CudaWords words;
  OtherProcess trainer("trainer");
  trainer.line().Send("page", words.descriptor());
  trainer.line().Expect("parked");

  ncclUniqueId id;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t communicator = nullptr;
  CUstream stream = fakes::MakeStream();
  const CUdeviceptr data = fakes::MakeFloats(kCount);
  void* const buffer = reinterpret_cast<void*>(data);
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result == ncclSuccess) result = ncclCommInitRankConfig(&communicator, 1, id, 0, &config);
  if (result == ncclSuccess || result == ncclInProgress) result = Settled(communicator);
  Fact("connected_beside_a_parked_stream", static_cast<int>(result));
  if (result == ncclSuccess) {
    result = ncclAllReduce(buffer, buffer, kCount, ncclFloat32, ncclSum, communicator, stream);
  }
  if (result == ncclSuccess || result == ncclInProgress) result = Settled(communicator);
  Fact("all_reduced", static_cast<int>(result));
  if (result != ncclSuccess) {
    return {Answer::Kind::kDoesNotHold, ncclGetErrorString(result)};
  }

  const double begin = NowMs();
  std::promise<ncclResult_t> aborted;
  std::future<ncclResult_t> abort = aborted.get_future();
  std::thread([&, communicator] { aborted.set_value(AbortInGroup(communicator)); }).detach();
  const bool in_time =
      abort.wait_for(std::chrono::milliseconds(kPatienceMs)) == std::future_status::ready;
  Fact("abort_ms", NowMs() - begin);
  words.word(0).store(1);
  trainer.line().Send("released");
  const std::optional<Message> end = trainer.line().Receive();
  const bool goes_on = end.has_value() && end->text == "goes on";
  Fact("trainer_goes_on", goes_on);
  // The aborting thread may still be inside NCCL.
  if (!in_time &&
      abort.wait_for(std::chrono::milliseconds(kPatienceMs)) != std::future_status::ready) {
    return {Answer::Kind::kDoesNotHold, "the abort hangs for good"};
  }
  Fact("aborted", static_cast<int>(abort.get()));
  if (!in_time) return {Answer::Kind::kDoesNotHold, "the abort waited for the parked stream"};
  if (!goes_on) return {Answer::Kind::kDoesNotHold, "the trainer was not released"};
  return {};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"trainer", Trainer}}, Ask);
}
