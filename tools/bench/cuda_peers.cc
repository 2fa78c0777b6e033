#include "tools/bench/cuda_peers.h"

namespace gradsync::bench {

std::unique_ptr<Peer> MakeCudaPeer(const std::string& name, const PeerOptions& options) {
  if (name == "roofline") return MakeCudaRooflinePeer(options);
  if (name == "kernels") return MakeCudaKernelsPeer(options);
  if (name == "gradsync") return MakeCudaGradsyncPeer(options);
  if (name == "nccl") return MakeCudaNcclPeer(options);
  return nullptr;
}

}  // namespace gradsync::bench
