#include "daemon/rpc/encode.h"

#include <type_traits>
#include <variant>

#include "daemon/rpc/message_memory.h"
#include "daemon/rpc/status_mapping.h"

namespace gradsync::daemon {
namespace {

struct Encoder {
  v1::SessionResponse* response;

  void operator()(const LayoutReadyMessage& message) const {
    auto* out = response->mutable_layout_ready();
    out->set_channel(message.channel);
    out->set_fingerprint(message.fingerprint);
    out->set_first_step(message.first_step);
  }
  void operator()(const LayoutFailedMessage& message) const {
    auto* out = response->mutable_operation_failed();
    out->set_sequence(message.request_id);
    *out->mutable_status() = ToProto(message.status);
    out->set_layout(true);
  }
  void operator()(const BucketDoneMessage& message) const {
    auto* out = response->mutable_bucket_done();
    out->set_channel(message.channel);
    out->set_step(message.step);
    out->set_bucket(message.bucket);
    out->set_start_ns(message.start_ns);
    out->set_finish_ns(message.finish_ns);
  }
  void operator()(const StepDoneMessage& message) const {
    auto* out = response->mutable_step_done();
    const StepRecord& record = *message.record;
    out->set_channel(message.channel);
    out->set_step(record.times.step);
    out->set_verdict(record.verdict.ok() ? v1::VERDICT_COMPLETE : v1::VERDICT_VOID);
    if (!record.verdict.ok()) *out->mutable_status() = ToProto(record.verdict);
    out->set_used_map(record.used_map);
    out->set_live_ranks(record.live_ranks);
    out->set_divisor(record.divisor);
    Encode(record.times, out->mutable_buckets());
    for (const GradientStats& stats : record.stats) {
      out->add_sum_of_squares(stats.sum_of_squares);
      out->add_non_finite(stats.non_finite);
    }
  }
  void operator()(const ChunkReadyMessage& message) const {
    auto* out = response->mutable_chunk_ready();
    out->set_sequence(message.sequence);
    out->set_chunk(message.chunk);
    out->set_bytes(message.bytes);
    out->set_write(message.write);
  }
  void operator()(const OperationDoneMessage& message) const {
    response->mutable_operation_done()->set_sequence(message.sequence);
  }
  void operator()(const OperationFailedMessage& message) const {
    auto* out = response->mutable_operation_failed();
    out->set_sequence(message.sequence);
    *out->mutable_status() = ToProto(message.status);
  }
  void operator()(const LeaveDoneMessage& message) const {
    auto* out = response->mutable_leave_done();
    out->set_last_to_leave(message.last_to_leave);
    out->set_next_sequence(message.next_sequence);
    for (const auto& [channel, step] : message.next_steps) {
      auto* next = out->add_next_steps();
      next->set_channel(channel);
      next->set_step(step);
    }
  }
  void operator()(const HealedMessage& message) const {
    response->mutable_healed()->set_next_sequence(message.next_sequence);
  }
  void operator()(const StateQuestionMessage& message) const {
    auto* out = response->mutable_state_question();
    out->set_transfer(message.transfer);
    out->set_offer(message.offer);
  }
  void operator()(const StateBeginMessage& message) const {
    auto* out = response->mutable_state_begin();
    out->set_transfer(message.transfer);
    out->set_bytes(message.bytes);
    out->set_source(message.source);
  }
  void operator()(const StateChunkMessage& message) const {
    auto* out = response->mutable_state_chunk();
    out->set_transfer(message.transfer);
    out->set_chunk(message.chunk);
    out->set_bytes(message.bytes);
    out->set_write(message.write);
  }
  void operator()(const StateAdmittedMessage& message) const {
    response->mutable_state_admitted()->set_transfer(message.transfer);
  }
  void operator()(const StateCancelledMessage& message) const {
    response->mutable_state_cancelled()->set_transfer(message.transfer);
  }
  void operator()(const StateFailedMessage& message) const {
    *response->mutable_state_failed()->mutable_status() = ToProto(message.status);
  }
  void operator()(const SessionEndMessage& message) const {
    *response->mutable_session_ending()->mutable_status() = ToProto(message.status);
  }
  void operator()(const StillWaitingMessage& message) const {
    response->mutable_still_waiting()->set_text(message.text);
  }
  void operator()(const LeaseQuestionMessage& message) const {
    response->mutable_lease_question()->set_number(message.number);
  }
  void operator()(const ForwardedMessage& message) const { *response = *message.response; }
};

v1::ReduceOp ToProto(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return v1::REDUCE_OP_AVERAGE;
    case ReduceOp::kSum:
      return v1::REDUCE_OP_SUM;
    case ReduceOp::kMin:
      return v1::REDUCE_OP_MIN;
    case ReduceOp::kMax:
      return v1::REDUCE_OP_MAX;
  }
  return v1::REDUCE_OP_UNSPECIFIED;
}

// Code, text and a handful of fields.
std::size_t BytesOf(const absl::Status& status) {
  constexpr std::size_t kFieldBytes = 512;
  return status.ok() ? 0 : status.message().size() + kFieldBytes;
}

// What a message keeps beside itself.
struct QueuedBytesOf {
  // Each rank's message counts the record that all share: one of them may be the last to keep it.
  std::size_t operator()(const StepDoneMessage& message) const {
    const StepRecord& record = *message.record;
    const auto& buckets = record.times.buckets;
    // One ready time per rank, in every bucket alike.
    const std::size_t ranks = buckets.empty() ? 0 : buckets.front().ready_ns.size();
    return buckets.size() * (sizeof(buckets.front()) + ranks * sizeof(std::uint64_t)) +
           record.stats.size() * sizeof(GradientStats) + record.used_map.size() +
           BytesOf(record.verdict);
  }
  std::size_t operator()(const LeaveDoneMessage& message) const {
    return message.next_steps.size() * sizeof(LeaveDoneMessage::NextStep);
  }
  std::size_t operator()(const LayoutFailedMessage& message) const {
    return BytesOf(message.status);
  }
  std::size_t operator()(const OperationFailedMessage& message) const {
    return BytesOf(message.status);
  }
  std::size_t operator()(const StateFailedMessage& message) const {
    return BytesOf(message.status);
  }
  std::size_t operator()(const SessionEndMessage& message) const { return BytesOf(message.status); }
  std::size_t operator()(const StillWaitingMessage& message) const { return message.text.size(); }
  std::size_t operator()(const ForwardedMessage& message) const { return message.bytes; }
  template <class Plain>
  std::size_t operator()(const Plain&) const {
    static_assert(std::is_trivially_copyable_v<Plain>);
    return 0;
  }
};

}  // namespace

void EncodeBuckets(const LayoutPlan& plan, v1::LayoutAssigned* assigned) {
  assigned->set_arena_bytes(plan.arena_bytes);
  assigned->set_verdict_offset(plan.verdict_offset);
  for (const PlannedBucket& bucket : plan.buckets) {
    auto* out = assigned->add_buckets();
    out->set_dtype(static_cast<v1::DataType>(bucket.dtype));
    out->set_count(bucket.count);
    out->set_offset(bucket.offset);
  }
}

void Encode(const LayoutPlan& plan, v1::LayoutAssigned* assigned) {
  EncodeBuckets(plan, assigned);
  for (const PlannedParameter& placement : plan.placements) {
    auto* out = assigned->add_placements();
    out->set_bucket(placement.bucket);
    out->set_offset(placement.offset);
  }
}

void Encode(const CurrentLayout& layout, v1::CurrentLayout* out) {
  const LayoutSpec& spec = *layout.spec;
  out->set_step(layout.step);
  auto* request = out->mutable_layout();
  request->set_name(spec.name);
  for (const Parameter& parameter : spec.parameters) {
    auto* one = request->add_parameters();
    one->set_name(parameter.name);
    *one->mutable_shape() = {parameter.shape.begin(), parameter.shape.end()};
    one->set_dtype(static_cast<v1::DataType>(parameter.dtype));
  }
  for (const auto& [dtype, count] : spec.explicit_buckets) {
    auto* bucket = request->add_explicit_buckets();
    bucket->set_dtype(static_cast<v1::DataType>(dtype));
    bucket->set_count(count);
  }
  request->set_bucket_cap_bytes(spec.bucket_cap_bytes);
  request->set_first_bucket_cap_bytes(spec.first_bucket_cap_bytes);
  request->set_last_bucket_cap_bytes(spec.last_bucket_cap_bytes);
  request->set_op(ToProto(spec.op));
  request->set_buffer_bytes(spec.buffer_bytes);
}

void Encode(const GpuArena& arena, v1::LayoutAssigned* assigned) {
  assigned->set_arena_bytes(arena.bytes());
  assigned->set_memory(arena.fd() >= 0 ? v1::ARENA_MEMORY_CUDA_VMM : v1::ARENA_MEMORY_CUDA_IPC);
  assigned->set_ipc_handle(arena.ipc_handle());
}

void Encode(const StepTimes& times, google::protobuf::RepeatedPtrField<v1::BucketTimes>* buckets) {
  for (std::size_t i = 0; i < times.buckets.size(); ++i) {
    v1::BucketTimes* bucket = buckets->Add();
    bucket->set_bucket(static_cast<std::uint32_t>(i));
    bucket->mutable_ready_ns()->Add(times.buckets[i].ready_ns.begin(),
                                    times.buckets[i].ready_ns.end());
    bucket->set_start_ns(times.buckets[i].start_ns);
    bucket->set_finish_ns(times.buckets[i].finish_ns);
  }
}

void Encode(const SessionMessage& message, v1::SessionResponse* response) {
  response->Clear();
  std::visit(Encoder{response}, message);
}

std::size_t QueuedBytes(const SessionMessage& message) {
  return sizeof(SessionMessage) + std::visit(QueuedBytesOf{}, message);
}

std::size_t QueuedBytes(const v1::SessionResponse& answer) {
  if (!answer.has_layout_assigned()) return MemoryOf(answer);
  constexpr std::size_t kTextBytes = 256;  // of the nonce and of the IPC handle
  const v1::LayoutAssigned& assigned = answer.layout_assigned();
  return sizeof(answer) + sizeof(assigned) + kMallocBytes + kTextBytes +
         MemoryOfPlain(assigned.buckets()) + MemoryOfPlain(assigned.placements());
}

}  // namespace gradsync::daemon
