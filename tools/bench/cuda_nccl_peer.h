// NCCL in the trainers' own processes, as PyTorch's DDP uses it: by blocking communicators, whose
// calls return with the all-reduce on the stream.

#ifndef TOOLS_BENCH_CUDA_NCCL_PEER_H_
#define TOOLS_BENCH_CUDA_NCCL_PEER_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

// One rank per GPU is what NCCL allows: with more, each has a communicator of its own, whose calls
// cost the caller the same and average nothing.
std::unique_ptr<Peer> MakeCudaNcclPeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_NCCL_PEER_H_
