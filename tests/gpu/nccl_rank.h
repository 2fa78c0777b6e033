// One of two NCCL ranks, each in a process of its own, that may share a GPU.

#ifndef TESTS_GPU_NCCL_RANK_H_
#define TESTS_GPU_NCCL_RANK_H_

#include <cuda.h>
#include <nccl.h>

#include <cstddef>

namespace gradsync::gpu {

// A nonblocking communicator like the product's, in the current context. NCCL refuses two ranks on
// one GPU unless it takes them for ranks of two machines: so each rank has a host id of its own,
// and they are connected by sockets. The memory and the stream live until the process ends. Not
// thread-safe.
class NcclRank {
 public:
  static constexpr int kRanks = 2;

  // `rank` is 0 or 1. Sets NCCL's variables in this process, so it comes before NCCL's first call.
  explicit NcclRank(int rank, std::size_t floats);

  // Returns when both ranks are connected; ncclInProgress if that takes too long.
  ncclResult_t Connect(const ncclUniqueId& id);
  // Begins a sum of the first `count` elements, in place. Returns when it is on the stream.
  ncclResult_t AllReduce(std::size_t count, ncclDataType_t type = ncclFloat32);
  // The same, without the wait for NCCL to settle.
  ncclResult_t Begin(std::size_t count, ncclDataType_t type = ncclFloat32);
  // Polls until the communicator is not in progress. ncclInProgress after `patience_ms`.
  ncclResult_t Settled(int patience_ms = 15'000);
  // NCCL's asynchronous error now.
  ncclResult_t State();
  // As the product does (nccl_communicator.cc): within a group, NCCL sets the communicator's flag
  // at once and frees its memory at the end of the group.
  ncclResult_t Abort();

  CUdeviceptr data() const { return data_; }
  CUstream stream() const { return stream_; }

 private:
  const int rank_;
  CUdeviceptr data_;
  CUstream stream_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace gradsync::gpu

#endif  // TESTS_GPU_NCCL_RANK_H_
