// Experiment (c): can a worker abort its NCCL communicator while trainers' streams are parked?
//
// A trainer's stream waits for a word, as it does for an average. The first process is the worker,
// rank 0 of 2; both ranks are on one GPU. They do an all-reduce. In a second one rank 0's kernel
// waits for rank 1, which does not take part. Then rank 0 aborts its communicator.
//
// holds: the abort returns while the trainer is parked, and the word then releases the trainer.

#include <cuda.h>
#include <nccl.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <thread>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/cuda_words.h"
#include "tests/gpu/experiment.h"
#include "tests/gpu/nccl_rank.h"

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

// Rank 1: it takes part in the first all-reduce alone, so the second one never ends.
void Peer(const Line& first) {
  fakes::EnterContext();
  NcclRank rank(1, kCount);
  const Message said = *first.Receive();
  ncclUniqueId id;
  std::memcpy(&id, said.text.data(), sizeof(id));
  if (rank.Connect(id) != ncclSuccess || rank.AllReduce(kCount) != ncclSuccess) std::exit(2);
  CUDA_OK(cuStreamSynchronize(rank.stream()));
  first.Send("done");
  first.Receive();  // until it is killed
}

Answer Ask() {
  fakes::EnterContext();
  CudaWords words;
  OtherProcess trainer("trainer");
  trainer.line().Send("page", words.descriptor());
  trainer.line().Expect("parked");

  OtherProcess peer("peer");
  NcclRank rank(0, kCount);
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  peer.line().Send(std::string(reinterpret_cast<const char*>(&id), sizeof(id)));
  if (result == ncclSuccess) result = rank.Connect(id);
  Fact("connected_beside_a_parked_stream", static_cast<int>(result));
  if (result == ncclSuccess) result = rank.AllReduce(kCount);
  Fact("all_reduced", static_cast<int>(result));
  if (result == ncclSuccess) {
    peer.line().Expect("done");
    CUDA_OK(cuStreamSynchronize(rank.stream()));
    result = rank.AllReduce(kCount);
    Fact("all_reduce_of_one_rank", static_cast<int>(result));
  }
  if (result != ncclSuccess) {
    return {Answer::Kind::kDoesNotHold, ncclGetErrorString(result)};
  }
  Fact("kernel_spins", cuStreamQuery(rank.stream()) == CUDA_ERROR_NOT_READY);

  const double begin = NowMs();
  std::promise<ncclResult_t> aborted;
  std::future<ncclResult_t> abort = aborted.get_future();
  std::thread([&] { aborted.set_value(rank.Abort()); }).detach();
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
  return RunExperiment(argc, argv, {{"trainer", Trainer}, {"peer", Peer}}, Ask);
}
