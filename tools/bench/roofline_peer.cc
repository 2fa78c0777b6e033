#include "tools/bench/roofline_peer.h"

namespace gradsync::bench {

absl::Status RooflinePeer::SetUp(const Order& order) {
  absl::StatusOr<SharedRegion> memory = SharedRegion::Open(order.memory_path);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  buffer_ = memory_.data() + options_.rank * RooflineStride(order.bytes);
  return absl::OkStatus();
}

absl::Status RooflinePeer::AllReduce(HandoffTimes*) {
  return absl::InternalError("the roofline's ranks do not reduce");
}

absl::Status RooflinePeer::TearDown() {
  memory_ = SharedRegion();
  return absl::OkStatus();
}

}  // namespace gradsync::bench
