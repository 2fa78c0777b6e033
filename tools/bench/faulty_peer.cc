#include "tools/bench/faulty_peer.h"

namespace gradsync::bench {

absl::Status FaultyPeer::SetUp(const Order& order) {
  absl::StatusOr<SharedRegion> memory = SharedRegion::Private(order.bytes);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  order_ = &order;
  return absl::OkStatus();
}

absl::Status FaultyPeer::AllReduce(HandoffTimes*) {
  const std::size_t item_size = ItemSize(options_.dtype);
  const std::size_t count = memory_.bytes() / item_size;
  pattern_.FillAverage(order_->iteration, memory_.data(), count);
  memory_.data()[(count - 1) * item_size] ^= std::byte{1};
  return absl::OkStatus();
}

absl::Status FaultyPeer::TearDown() {
  memory_ = SharedRegion();
  return absl::OkStatus();
}

}  // namespace gradsync::bench
