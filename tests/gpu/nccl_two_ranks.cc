// Experiment (g): does NCCL take two ranks on one GPU if it takes them for two machines, and what
// does an all-reduce between them cost its caller? What does it do when the other rank is killed?
//
// Both ranks are processes with a host id of their own, connected by sockets over the loopback.
// They sum buffers of several sizes in float32 and bfloat16. Then rank 1 is killed while rank 0's
// kernel waits for it. The product's tests of two nodes, and what it does when a worker is lost,
// need this.
//
// settle_us: from the call of ncclAllReduce until NCCL has settled, that is, until its kernel is on
// the stream. done_us: until the stream has the sum.
//
// holds: every sum is right, and after the kill NCCL reports an error or can be aborted.

#include <cuda.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda_process.h"
#include "tests/gpu/experiment.h"
#include "tests/gpu/nccl_rank.h"

namespace gradsync::gpu {
namespace {

constexpr std::size_t kKibibyte = 1024;
constexpr std::size_t kSizes[] = {4 * kKibibyte, 1024 * kKibibyte, 25 * 1024 * kKibibyte};
constexpr std::size_t kMostFloats = kSizes[2] / sizeof(float);
// Rounds of each size. A round of the largest may take a second, so there are fewer.
constexpr int kRounds = 10;
constexpr int kRoundsOfLargest = 3;
// How long rank 0 waits for NCCL to notice that rank 1 is dead, before it aborts.
constexpr int kNoticeMs = 3'000;
constexpr std::uint32_t kFloatOne = 0x3F800000;
constexpr std::uint32_t kTwoBfloatOnes = 0x3F803F80;

// Two bfloat16 take the place of a float.
std::size_t CountOf(std::size_t bytes, ncclDataType_t type) {
  return bytes / (type == ncclFloat32 ? sizeof(float) : sizeof(float) / 2);
}

struct Times {
  std::vector<double> settle_us, done_us;
  bool right = true;
};

// Both ranks do the same, each round from ones.
ncclResult_t Sum(NcclRank* rank, std::size_t bytes, ncclDataType_t type, Times* times) {
  const std::uint32_t one = type == ncclFloat32 ? kFloatOne : kTwoBfloatOnes;
  const std::uint32_t two = type == ncclFloat32 ? 0x40000000 : 0x40004000;
  const int rounds = bytes == kSizes[2] ? kRoundsOfLargest : kRounds;
  for (int round = 0; round < rounds; ++round) {
    CUDA_OK(cuMemsetD32Async(rank->data(), one, bytes / sizeof(one), rank->stream()));
    CUDA_OK(cuStreamSynchronize(rank->stream()));
    const double begin = NowMs();
    const ncclResult_t result = rank->AllReduce(CountOf(bytes, type), type);
    if (result != ncclSuccess) return result;
    const double settled = NowMs();
    CUDA_OK(cuStreamSynchronize(rank->stream()));
    times->settle_us.push_back((settled - begin) * 1e3);
    times->done_us.push_back((NowMs() - begin) * 1e3);
    float expected;
    std::memcpy(&expected, &two, sizeof(expected));
    const CUdeviceptr last = rank->data() + bytes - sizeof(float);
    times->right =
        times->right && fakes::ReadFloats(rank->data(), 1, rank->stream())[0] == expected;
    times->right = times->right && fakes::ReadFloats(last, 1, rank->stream())[0] == expected;
  }
  return ncclSuccess;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Peer(const Line& first) {
  fakes::EnterContext();
  NcclRank rank(1, kMostFloats);
  const Message said = *first.Receive();
  ncclUniqueId id;
  std::memcpy(&id, said.text.data(), sizeof(id));
  if (rank.Connect(id) != ncclSuccess) std::exit(2);
  for (const std::size_t bytes : kSizes) {
    for (const ncclDataType_t type : {ncclFloat32, ncclBfloat16}) {
      Times times;
      if (Sum(&rank, bytes, type, &times) != ncclSuccess) std::exit(2);
    }
  }
  first.Send("summed");
  first.Receive();  // until it is killed
}

Answer Ask() {
  fakes::EnterContext();
  OtherProcess peer("peer");
  NcclRank rank(0, kMostFloats);
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  peer.line().Send(std::string(reinterpret_cast<const char*>(&id), sizeof(id)));
  const double begin = NowMs();
  if (result == ncclSuccess) result = rank.Connect(id);
  Fact("connect_ms", NowMs() - begin);
  Fact("connected", static_cast<int>(result));
  if (result != ncclSuccess) return {Answer::Kind::kDoesNotHold, ncclGetErrorString(result)};

  bool right = true;
  for (const std::size_t bytes : kSizes) {
    for (const ncclDataType_t type : {ncclFloat32, ncclBfloat16}) {
      Times times;
      result = Sum(&rank, bytes, type, &times);
      if (result != ncclSuccess) return {Answer::Kind::kDoesNotHold, ncclGetErrorString(result)};
      const std::string of = std::string(type == ncclFloat32 ? "float32_" : "bfloat16_") +
                             std::to_string(bytes / kKibibyte) + "KiB";
      Fact("settle_us_" + of, Median(times.settle_us));
      Fact("done_us_" + of, Median(times.done_us));
      right = right && times.right;
    }
  }
  Fact("sums_are_right", right);
  if (!right) return {Answer::Kind::kDoesNotHold, "a sum is wrong"};

  peer.line().Expect("summed");
  result = rank.AllReduce(kMostFloats);
  Fact("began_alone", static_cast<int>(result));
  Fact("kernel_spins", cuStreamQuery(rank.stream()) == CUDA_ERROR_NOT_READY);
  peer.Kill();
  const double killed = NowMs();
  ncclResult_t noticed = ncclSuccess;
  Await([&] { return (noticed = rank.State()) != ncclSuccess && noticed != ncclInProgress; },
        kNoticeMs);
  Fact("noticed", static_cast<int>(noticed));
  Fact("noticed_ms", NowMs() - killed);
  const double aborting = NowMs();
  const ncclResult_t aborted = rank.Abort();
  Fact("abort_ms", NowMs() - aborting);
  Fact("aborted", static_cast<int>(aborted));
  const bool ends = Await([&] { return cuStreamQuery(rank.stream()) != CUDA_ERROR_NOT_READY; });
  Fact("stream_ends", ends);
  if (!ends) return {Answer::Kind::kDoesNotHold, "the stream hangs after the abort"};
  return {};
}

}  // namespace
}  // namespace gradsync::gpu

int main(int argc, char** argv) {
  using namespace gradsync::gpu;  // NOLINT(google-build-using-namespace): main is nothing else
  return RunExperiment(argc, argv, {{"peer", Peer}}, Ask);
}
