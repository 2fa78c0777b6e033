// A rank of gradsync whose bucket lies on a GPU.

#ifndef TOOLS_BENCH_CUDA_GRADSYNC_PEER_H_
#define TOOLS_BENCH_CUDA_GRADSYNC_PEER_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakeCudaGradsyncPeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_CUDA_GRADSYNC_PEER_H_
