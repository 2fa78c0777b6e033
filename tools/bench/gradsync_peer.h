// A rank of gradsync: a trainer with one bucket, through the client library.

#ifndef TOOLS_BENCH_GRADSYNC_PEER_H_
#define TOOLS_BENCH_GRADSYNC_PEER_H_

#include <memory>

#include "tools/bench/peer.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakeGradsyncPeer(const PeerOptions& options);

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_GRADSYNC_PEER_H_
