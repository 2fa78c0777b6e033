#include "daemon/peer/rank_messages.h"

#include <cstddef>

#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

std::uint64_t MsUntil(std::uint64_t deadline_ns, std::uint64_t now_ns) {
  return deadline_ns <= now_ns ? 1 : (deadline_ns - now_ns + 999'999) / 1'000'000;
}

}  // namespace

absl::Status StatusFromPeer(const google::rpc::Status& proto) {
  constexpr std::size_t kMaxMessageBytes = 4096;
  constexpr std::size_t kMaxDetailsBytes = 8192;
  google::rpc::Status clipped;
  const bool known = proto.code() >= 0 && proto.code() <= 16;
  clipped.set_code(known ? proto.code() : static_cast<int>(absl::StatusCode::kUnknown));
  clipped.set_message(proto.message().substr(0, kMaxMessageBytes));
  if (proto.details_size() == 1 && proto.details(0).ByteSizeLong() <= kMaxDetailsBytes) {
    *clipped.add_details() = proto.details(0);
  }
  return FromProto(clipped);
}

void EncodeOperation(std::uint64_t sequence, const OperationSpec& spec, std::uint64_t deadline_ns,
                     std::uint64_t now_ns, v1::SessionRequest* message) {
  const std::uint64_t timeout_ms = MsUntil(deadline_ns, now_ns);
  switch (spec.kind) {
    case OperationKind::kBarrier:
      message->mutable_barrier()->set_sequence(sequence);
      message->mutable_barrier()->set_timeout_ms(timeout_ms);
      return;
    case OperationKind::kBroadcast: {
      auto* out = message->mutable_broadcast();
      out->set_sequence(sequence);
      out->set_root(spec.root);
      out->set_bytes(spec.bytes);
      out->set_timeout_ms(timeout_ms);
      return;
    }
    case OperationKind::kAllReduce: {
      auto* out = message->mutable_all_reduce();
      out->set_sequence(sequence);
      out->set_dtype(static_cast<v1::DataType>(spec.dtype));
      out->set_count(spec.count);
      out->set_op(spec.average ? v1::REDUCE_OP_AVERAGE : v1::REDUCE_OP_SUM);
      out->set_timeout_ms(timeout_ms);
      return;
    }
  }
}

bool SameBuckets(const LayoutPlan& plan, const v1::LayoutAssigned& assigned) {
  if (plan.arena_bytes != assigned.arena_bytes() ||
      plan.buckets.size() != static_cast<std::size_t>(assigned.buckets_size())) {
    return false;
  }
  for (std::size_t i = 0; i < plan.buckets.size(); ++i) {
    const v1::Bucket& other = assigned.buckets(static_cast<int>(i));
    if (plan.buckets[i].count != other.count() || plan.buckets[i].offset != other.offset() ||
        static_cast<int>(plan.buckets[i].dtype) != other.dtype()) {
      return false;
    }
  }
  return true;
}

}  // namespace gradsync::daemon
