#include "tools/bench/cuda_peers.h"

#include "tools/bench/cuda_gradsync_peer.h"
#include "tools/bench/cuda_local_peer.h"
#include "tools/bench/cuda_nccl_peer.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakeCudaPeer(Implementation implementation, const PeerOptions& options) {
  switch (implementation) {
    case Implementation::kRoofline:
      return MakeCudaRooflinePeer(options);
    case Implementation::kKernels:
      return MakeCudaKernelsPeer(options);
    case Implementation::kGradsync:
      return MakeCudaGradsyncPeer(options);
    case Implementation::kNccl:
      return MakeCudaNcclPeer(options);
    case Implementation::kGloo:
    case Implementation::kOpenMpi:
    case Implementation::kFaulty:
      break;  // of host memory alone
  }
  return nullptr;
}

}  // namespace gradsync::bench
