#include "tools/bench/peer.h"

#include "absl/strings/str_cat.h"
#include "tools/bench/cuda_peers.h"
#include "tools/bench/gradsync_peer.h"
#include "tools/bench/pattern.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {
namespace {

// An all-reduce with a known fault: the last element of each rank has one bit wrong. It shows that
// wrong elements are counted. It knows the average and exchanges nothing.
class FaultyPeer final : public Peer {
 public:
  explicit FaultyPeer(const PeerOptions& options)
      : options_(options), pattern_(options.dtype, options.ranks) {}

  absl::Status SetUp(std::size_t bytes) override {
    absl::StatusOr<SharedRegion> memory = SharedRegion::Private(bytes);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    return absl::OkStatus();
  }

  std::byte* buffer() override { return memory_.data(); }

  absl::Status AllReduce(Turn* turn) override {
    const std::size_t item_size = ItemSize(options_.dtype);
    const std::size_t count = memory_.bytes() / item_size;
    pattern_.FillAverage(turn->iteration, memory_.data(), count);
    memory_.data()[(count - 1) * item_size] ^= std::byte{1};
    return absl::OkStatus();
  }

  absl::Status TearDown() override {
    memory_ = SharedRegion();
    return absl::OkStatus();
  }

 private:
  const PeerOptions options_;
  const Pattern pattern_;
  SharedRegion memory_;
};

std::unique_ptr<Peer> MakeHostPeer(const std::string& name, const PeerOptions& options) {
  if (name == "roofline") return MakeRooflinePeer(options);
  if (name == "gradsync") return std::make_unique<GradsyncPeer>(options);
  if (name == "gloo") return MakeGlooPeer(options);
  if (name == "openmpi") return MakeOpenMpiPeer(options);
  if (name == "faulty") return std::make_unique<FaultyPeer>(options);
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
