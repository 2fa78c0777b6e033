#include "tools/bench/peer.h"

#include "absl/strings/str_cat.h"
#include "tools/bench/cuda_peers.h"
#include "tools/bench/gradsync_peer.h"

namespace gradsync::bench {
namespace {

std::unique_ptr<Peer> MakeHostPeer(const std::string& name, const PeerOptions& options) {
  if (name == "roofline") return MakeRooflinePeer(options);
  if (name == "gradsync") return std::make_unique<GradsyncPeer>(options);
  if (name == "gloo") return MakeGlooPeer(options, /*faulty=*/false);
  if (name == "openmpi") return MakeOpenMpiPeer(options);
  if (name == "faulty") return MakeGlooPeer(options, /*faulty=*/true);
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Peer>> MakePeer(const std::string& name,
                                               const PeerOptions& options) {
  auto peer = options.gpus > 0 ? MakeCudaPeer(name, options) : MakeHostPeer(name, options);
  if (peer != nullptr) return peer;
  return absl::InvalidArgumentError(absl::StrCat("bench-rank has no implementation ", name));
}

}  // namespace gradsync::bench
