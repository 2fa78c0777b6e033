#include "tools/bench/peer.h"

#include "tools/bench/cuda_peers.h"
#include "tools/bench/faulty_peer.h"
#include "tools/bench/gloo_peer.h"
#include "tools/bench/gradsync_peer.h"
#include "tools/bench/openmpi_peer.h"
#include "tools/bench/roofline_peer.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakePeer(Implementation implementation, const PeerOptions& options) {
  if (options.gpus > 0) return MakeCudaPeer(implementation, options);
  switch (implementation) {
    case Implementation::kRoofline:
      return std::make_unique<RooflinePeer>(options);
    case Implementation::kGradsync:
      return std::make_unique<GradsyncPeer>(options);
    case Implementation::kGloo:
      return MakeGlooPeer(options);
    case Implementation::kOpenMpi:
      return MakeOpenMpiPeer(options);
    case Implementation::kFaulty:
      return std::make_unique<FaultyPeer>(options);
    case Implementation::kKernels:
    case Implementation::kNccl:
      break;  // of GPUs alone
  }
  return nullptr;
}

}  // namespace gradsync::bench
