// A rank of the roofline: owns a buffer and rewrites it. The conductor's RooflineThreads do the
// averaging, in memory that all of them map.

#ifndef TOOLS_BENCH_ROOFLINE_PEER_H_
#define TOOLS_BENCH_ROOFLINE_PEER_H_

#include "tools/bench/peer.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {

// Bytes from one rank's buffer to the next in the shared memory: whole pages, and room for the loop
// to run over the end.
constexpr std::size_t RooflineStride(std::size_t bytes) {
  return (bytes + 4096 + 4095) / 4096 * 4096;
}

class RooflinePeer final : public Peer {
 public:
  explicit RooflinePeer(const PeerOptions& options) : options_(options) {}

  absl::Status SetUp(const Order& order) override;
  std::byte* buffer() override { return buffer_; }
  absl::Status AllReduce(HandoffTimes* times) override;
  absl::Status TearDown() override;

 private:
  const PeerOptions options_;
  SharedRegion memory_;
  std::byte* buffer_ = nullptr;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_ROOFLINE_PEER_H_
