// A rank of raw Gloo: one ring of all ranks by TCP, as PyTorch's DDP on CPUs does it.

#ifndef TOOLS_BENCH_GLOO_PEER_H_
#define TOOLS_BENCH_GLOO_PEER_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakeGlooPeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_GLOO_PEER_H_
