// An all-reduce with a fault that is known exactly: the last element of each rank has one bit
// wrong. It shows that the bench's column of wrong elements is alive.

#ifndef TOOLS_BENCH_FAULTY_PEER_H_
#define TOOLS_BENCH_FAULTY_PEER_H_

#include "tools/bench/pattern.h"
#include "tools/bench/peer.h"
#include "tools/bench/shared_region.h"

namespace gradsync::bench {

// Exchanges nothing: it knows what the average must be.
class FaultyPeer final : public Peer {
 public:
  explicit FaultyPeer(const PeerOptions& options)
      : options_(options), pattern_(options.dtype, options.ranks) {}

  absl::Status SetUp(const Order& order) override;
  std::byte* buffer() override { return memory_.data(); }
  absl::Status AllReduce(HandoffTimes* times) override;
  absl::Status TearDown() override;

 private:
  const PeerOptions options_;
  const Pattern pattern_;
  SharedRegion memory_;
  const Order* order_ = nullptr;
};

}  // namespace gradsync::bench

#endif  // TOOLS_BENCH_FAULTY_PEER_H_
