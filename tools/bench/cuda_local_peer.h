// What one GPU does by itself with the buffers of its ranks: rank 0 has them all, and is the only
// one that works. Timed by the GPU's clock.

#ifndef TOOLS_BENCH_CUDA_LOCAL_PEER_H_
#define TOOLS_BENCH_CUDA_LOCAL_PEER_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

// Combine and write-back, as a worker enqueues them. Every buffer holds rank 0's values.
std::unique_ptr<Peer> MakeCudaKernelsPeer(const PeerOptions& options);

// Copies of the driver between the same buffers. Combine and write-back of k buffers read k + 1 and
// write k + 1; so do k + 1 copies.
std::unique_ptr<Peer> MakeCudaRooflinePeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_LOCAL_PEER_H_
