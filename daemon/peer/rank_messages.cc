#include "daemon/peer/rank_messages.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "daemon/rpc/decode.h"
#include "daemon/rpc/status_mapping.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync {
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

void EncodeOpen(const JoinRequest& request, v1::OpenSession* open) {
  open->mutable_protocol()->set_oldest(kProtocolOldest);
  open->mutable_protocol()->set_newest(kProtocolNewest);
  open->set_shared_memory_abi(kSharedMemoryAbi);
  open->set_job_id(request.key.job_id);
  open->set_rank(request.rank);
  open->set_world_size(request.world_size);
  open->mutable_options()->set_divisor(request.options.divide_by_world ? v1::DIVISOR_WORLD
                                                                       : v1::DIVISOR_LIVE_RANKS);
  open->mutable_options()->set_step_timeout_ms(request.options.step_timeout_ns / 1'000'000);
  const NcclSettings& nccl = request.options.nccl;
  v1::NcclOptions* const told = open->mutable_options()->mutable_nccl();
  told->set_max_ctas(nccl.max_ctas);
  told->set_algorithm(static_cast<v1::NcclAlgorithm>(nccl.algorithm));
  told->set_protocol(static_cast<v1::NcclProtocol>(nccl.protocol));
  told->set_wire_type(static_cast<v1::NcclWireType>(nccl.wire_type));
  open->set_client(request.client);
}

void EncodeRegister(const LayoutRequest& request, std::uint64_t now_ns,
                    v1::RegisterLayout* message) {
  const LayoutSpec& spec = request.spec;
  message->set_request_id(request.request_id);
  message->set_name(spec.name);
  for (const Parameter& parameter : spec.parameters) {
    auto* out = message->add_parameters();
    out->set_name(parameter.name);
    *out->mutable_shape() = {parameter.shape.begin(), parameter.shape.end()};
    out->set_dtype(static_cast<v1::DataType>(parameter.dtype));
  }
  message->set_bucket_cap_bytes(spec.bucket_cap_bytes);
  message->set_first_bucket_cap_bytes(spec.first_bucket_cap_bytes);
  message->set_last_bucket_cap_bytes(spec.last_bucket_cap_bytes);
  for (const auto& [dtype, count] : spec.explicit_buckets) {
    auto* out = message->add_explicit_buckets();
    out->set_dtype(static_cast<v1::DataType>(dtype));
    out->set_count(count);
  }
  message->set_op(spec.average ? v1::REDUCE_OP_AVERAGE : v1::REDUCE_OP_SUM);
  message->set_timeout_ms(MsUntil(request.deadline_ns, now_ns));
  message->set_bucket_done_messages(request.bucket_done_messages);
  message->set_replaces(request.replaces);
  message->set_device(request.device);
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

std::optional<SessionMessage> DecodeSessionMessage(const v1::SessionResponse& response) {
  switch (response.kind_case()) {
    case v1::SessionResponse::kLayoutReady: {
      const auto& ready = response.layout_ready();
      return LayoutReadyMessage{ready.channel(), ready.fingerprint(), ready.first_step()};
    }
    case v1::SessionResponse::kBucketDone: {
      const auto& done = response.bucket_done();
      return BucketDoneMessage{done.channel(), done.step(), done.bucket(), done.start_ns(),
                               done.finish_ns()};
    }
    case v1::SessionResponse::kStepDone: {
      const auto& done = response.step_done();
      auto record = std::make_shared<StepRecord>();
      record->times.step = done.step();
      record->times.complete = done.verdict() == v1::VERDICT_COMPLETE;
      record->verdict = FromProto(done.status());
      if (!record->times.complete && record->verdict.ok()) {
        record->verdict = absl::AbortedError("the step is void");
      }
      record->used_map = done.used_map();
      record->live_ranks = done.live_ranks();
      record->divisor = done.divisor();
      for (const auto& bucket : done.buckets()) {
        BucketTimes times;
        times.ready_ns.assign(bucket.ready_ns().begin(), bucket.ready_ns().end());
        times.start_ns = bucket.start_ns();
        times.finish_ns = bucket.finish_ns();
        record->times.buckets.push_back(std::move(times));
      }
      const int numbers = std::min(done.sum_of_squares_size(), done.non_finite_size());
      for (int i = 0; i < numbers; ++i) {
        record->numbers.push_back({done.sum_of_squares(i), done.non_finite(i)});
      }
      return StepDoneMessage{done.channel(), std::move(record)};
    }
    case v1::SessionResponse::kChunkReady: {
      const auto& ready = response.chunk_ready();
      return ChunkReadyMessage{ready.sequence(), ready.chunk(), ready.bytes(), ready.write()};
    }
    case v1::SessionResponse::kOperationDone:
      return OperationDoneMessage{response.operation_done().sequence()};
    case v1::SessionResponse::kOperationFailed: {
      const auto& failed = response.operation_failed();
      if (failed.layout())
        return LayoutFailedMessage{failed.sequence(), FromProto(failed.status())};
      return OperationFailedMessage{failed.sequence(), FromProto(failed.status())};
    }
    case v1::SessionResponse::kLeaveDone: {
      const auto& done = response.leave_done();
      LeaveDoneMessage message{done.last_joiner(), done.next_sequence(), {}};
      for (const auto& next : done.next_steps()) {
        message.next_steps.push_back({next.channel(), next.step()});
      }
      return message;
    }
    default:
      return std::nullopt;
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

}  // namespace gradsync
