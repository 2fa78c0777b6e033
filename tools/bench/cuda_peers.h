// The ranks of implementations that reduce the memory of GPUs. Rank r of a bench on g GPUs lies on
// GPU r % g of those that its process sees.

#ifndef TOOLS_BENCH_CUDA_PEERS_H_
#define TOOLS_BENCH_CUDA_PEERS_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

//   roofline   rank 0 alone: copies within GPU 0, as many bytes as the reduction of its ranks moves
//   kernels    rank 0 alone: the reduction's kernels on as many buffers as GPU 0 has ranks
//   gradsync   gradsyncd and its workers
//   nccl       one communicator where every rank has a GPU, else one for each rank by itself
// Null for the others. Where CUDA's headers were missing at build time every call of it fails.
std::unique_ptr<Peer> MakeCudaPeer(Implementation implementation, const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_PEERS_H_
