#include "daemon/rpc/decode.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error.h"
#include "daemon/rpc/message_memory.h"
#include "proto/gradsync/limits.h"
#include "proto/gradsync/shared_memory.h"

namespace gradsync::daemon {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
// A week: longer than any useful wait, and short enough that sums of nanoseconds never overflow.
constexpr std::uint64_t kLongestMs = 7ull * 24 * 3600 * 1000;
// How long a rank waits for its coordinator.
constexpr std::uint64_t kPatienceMs = 20 * 1000;
constexpr std::uint64_t kLongestPatienceMs = 10 * 60 * 1000;
constexpr std::uint64_t kHoldTimeoutMs = 10 * 60 * 1000;
constexpr std::uint64_t kLayoutTimeoutMs = 5 * 60 * 1000;
constexpr std::uint64_t kOperationTimeoutMs = 30 * 60 * 1000;
constexpr std::uint32_t kMaxWorldSize = 1 << 16;
// Largest arena of one rank, 16 TiB. Keeps all sums of sizes far from overflow.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 44;
constexpr std::size_t kSha256Bytes = 32;

absl::Status Malformed(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed, what);
}

absl::Status CheckName(absl::string_view field, absl::string_view name, std::size_t most) {
  if (name.empty() || name.size() > most) {
    return Malformed(absl::StrCat(field, " has ", name.size(), " bytes; 1 to ", most, " allowed"));
  }
  if (!std::all_of(name.begin(), name.end(), [](char c) { return absl::ascii_isprint(c); })) {
    return Malformed(absl::StrCat(field, " has a character that is not printable ASCII"));
  }
  return absl::OkStatus();
}

std::uint64_t DeadlineNs(std::uint64_t timeout_ms, std::uint64_t default_ms, std::uint64_t now_ns) {
  const std::uint64_t ms = timeout_ms == 0 ? default_ms : std::min(timeout_ms, kLongestMs);
  return now_ns + ms * kNsPerMs;
}

absl::StatusOr<DataType> DecodeType(absl::string_view field, v1::DataType type) {
  switch (type) {
    case v1::DATA_TYPE_FLOAT32:
      return DataType::kFloat32;
    case v1::DATA_TYPE_FLOAT64:
      return DataType::kFloat64;
    case v1::DATA_TYPE_FLOAT16:
      return DataType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16:
      return DataType::kBfloat16;
    case v1::DATA_TYPE_INT8:
      return DataType::kInt8;
    case v1::DATA_TYPE_UINT8:
      return DataType::kUint8;
    case v1::DATA_TYPE_INT16:
      return DataType::kInt16;
    case v1::DATA_TYPE_INT32:
      return DataType::kInt32;
    case v1::DATA_TYPE_INT64:
      return DataType::kInt64;
    default:
      return Malformed(absl::StrCat(field, " has dtype ", static_cast<int>(type),
                                    "; float32, float64, float16, bfloat16, int8, uint8, int16, "
                                    "int32 and int64 are reduced"));
  }
}

absl::StatusOr<ReduceOp> DecodeOp(v1::ReduceOp op) {
  switch (op) {
    case v1::REDUCE_OP_UNSPECIFIED:
    case v1::REDUCE_OP_AVERAGE:
      return ReduceOp::kAverage;
    case v1::REDUCE_OP_SUM:
      return ReduceOp::kSum;
    case v1::REDUCE_OP_MIN:
      return ReduceOp::kMin;
    case v1::REDUCE_OP_MAX:
      return ReduceOp::kMax;
    default:
      return Malformed(absl::StrCat("op ", static_cast<int>(op), " is unknown"));
  }
}

absl::Status CheckReduction(absl::string_view field, ReduceOp op, DataType dtype,
                            ReducedMemory memory) {
  const char* const why = WhyRefused(op, dtype, memory);
  if (why == nullptr) return absl::OkStatus();
  return Malformed(
      absl::StrCat(field, ", ", ReduceOpName(op), " of ", DataTypeName(dtype), ": ", why));
}

// Adds the bytes of `count` elements to `total`; fails beyond kMaxBytes.
absl::Status AddBytes(absl::string_view field, std::uint64_t count, DataType dtype,
                      std::uint64_t* total) {
  if (count > kMaxBytes / ItemSize(dtype) || *total + count * ItemSize(dtype) > kMaxBytes) {
    return Malformed(absl::StrCat(field, ": the layout is larger than 16 TiB"));
  }
  *total += count * ItemSize(dtype) + kBucketAlignment;
  return absl::OkStatus();
}

absl::StatusOr<NcclSettings> DecodeNccl(const v1::NcclOptions& options) {
  if (options.max_ctas() > NcclSettings::kMaxCtas) {
    return Malformed(absl::StrCat("nccl.max_ctas is ", options.max_ctas(), "; 0 to ",
                                  NcclSettings::kMaxCtas, " allowed"));
  }
  if (!v1::NcclAlgorithm_IsValid(options.algorithm())) {
    return Malformed("nccl.algorithm is unknown");
  }
  if (!v1::NcclProtocol_IsValid(options.protocol())) return Malformed("nccl.protocol is unknown");
  if (!v1::NcclWireType_IsValid(options.wire_type())) return Malformed("nccl.wire_type is unknown");
  return NcclSettings{options.max_ctas(), static_cast<NcclAlgorithm>(options.algorithm()),
                      static_cast<NcclProtocol>(options.protocol()),
                      static_cast<NcclWireType>(options.wire_type())};
}

absl::StatusOr<OnRankLoss> DecodeLossPolicy(const v1::JobOptions& options) {
  if (!v1::StateSource_IsValid(options.state_source())) return Malformed("state_source is unknown");
  if (options.on_rank_loss() == v1::LOSS_POLICY_HOLD &&
      options.state_source() == v1::STATE_SOURCE_UNSPECIFIED) {
    return Malformed("on_rank_loss=hold needs a state_source: survivor or trainer");
  }
  switch (options.on_rank_loss()) {
    case v1::LOSS_POLICY_UNSPECIFIED:
    case v1::LOSS_POLICY_ABORT:
      return OnRankLoss::kAbort;
    case v1::LOSS_POLICY_HOLD:
      return OnRankLoss::kHold;
    case v1::LOSS_POLICY_CONTINUE:
      return MakeError(absl::StatusCode::kUnimplemented, reason::kLossPolicy,
                       "on_rank_loss=continue is not built in this daemon; use abort or hold");
    default:
      return Malformed("on_rank_loss is unknown");
  }
}

// The quota `most`, which `option` names, holds for a layout as a whole.
absl::Status CheckCount(absl::string_view what, std::size_t count, std::size_t most,
                        absl::string_view option) {
  if (count <= most) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, reason::kQuota,
                   absl::StrCat(count, " ", what, "; ", most, " allowed (", option, ")"));
}

// Adds items of one message to those of earlier ones.
absl::Status AddItems(const google::protobuf::RepeatedPtrField<v1::Parameter>& parameters,
                      const google::protobuf::RepeatedPtrField<v1::ExplicitBucket>& buckets,
                      const DecodeLimits& limits, LayoutItems* items) {
  if (absl::Status status = CheckCount(
          "parameters", items->parameters.size() + static_cast<std::size_t>(parameters.size()),
          limits.parameters, "quota_parameters_per_layout");
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          CheckCount("buckets", items->buckets.size() + static_cast<std::size_t>(buckets.size()),
                     limits.buckets, "quota_buckets_per_layout");
      !status.ok()) {
    return status;
  }
  for (const v1::Parameter& parameter : parameters) {
    if (parameter.name().empty() || parameter.name().size() > kMaxParameterNameBytes) {
      return Malformed(absl::StrCat("parameter ", items->parameters.size(), ": its name has ",
                                    parameter.name().size(), " bytes; 1 to ",
                                    kMaxParameterNameBytes, " allowed"));
    }
    const std::string field = absl::StrCat("parameter '", parameter.name(), "'");
    if (static_cast<std::size_t>(parameter.shape_size()) > kMaxDimensions) {
      return Malformed(absl::StrCat(field, " has ", parameter.shape_size(), " dimensions; at most ",
                                    kMaxDimensions, " allowed"));
    }
    const auto dtype = DecodeType(field, parameter.dtype());
    if (!dtype.ok()) return dtype.status();
    items->parameters.push_back(
        {parameter.name(), {parameter.shape().begin(), parameter.shape().end()}, *dtype});
  }
  for (const v1::ExplicitBucket& bucket : buckets) {
    const auto dtype = DecodeType(absl::StrCat("bucket ", items->buckets.size()), bucket.dtype());
    if (!dtype.ok()) return dtype.status();
    items->buckets.emplace_back(*dtype, bucket.count());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenRequest> DecodeOpen(const v1::OpenSession& message, std::uint32_t* protocol) {
  const v1::ProtocolRange& range = message.protocol();
  *protocol = std::min(range.newest(), kProtocolNewest);
  if (*protocol < std::max(range.oldest(), kProtocolOldest)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kVersion,
                     absl::StrCat("the client speaks protocol 1.", range.oldest(), " to 1.",
                                  range.newest(), ", this daemon 1.", kProtocolOldest, " to 1.",
                                  kProtocolNewest, ": upgrade the older of the two"));
  }
  if (message.shared_memory_abi() != kSharedMemoryAbi) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, reason::kVersion,
        absl::StrCat("the client uses shared-memory ABI ", message.shared_memory_abi(),
                     ", this daemon ", kSharedMemoryAbi, ": upgrade the older of the two"));
  }
  if (absl::Status status = CheckName("job_id", message.job_id(), kMaxJobIdBytes); !status.ok())
    return status;
  if (message.token().size() > kMaxTokenBytes) {
    return Malformed(absl::StrCat("token has more than ", kMaxTokenBytes, " bytes"));
  };
  if (message.coordinator().size() > 255 ||
      !std::all_of(message.coordinator().begin(), message.coordinator().end(),
                   [](char c) { return absl::ascii_isgraph(c); })) {
    return Malformed("coordinator has more than 255 bytes, or one that is not printable ASCII");
  }
  if (message.client().size() > kMaxClientNameBytes) {
    return Malformed(absl::StrCat("client has more than ", kMaxClientNameBytes, " bytes"));
  };
  if (message.world_size() == 0 || message.world_size() > kMaxWorldSize) {
    return Malformed(
        absl::StrCat("world_size ", message.world_size(), "; 1 to ", kMaxWorldSize, " allowed"));
  }
  if (message.rank() >= message.world_size()) {
    return Malformed(absl::StrCat("rank ", message.rank(), " in a world of ", message.world_size(),
                                  ": ranks count from 0"));
  }
  const v1::JobOptions& options = message.options();
  const auto policy = DecodeLossPolicy(options);
  if (!policy.ok()) return policy.status();
  if (!v1::Divisor_IsValid(options.divisor())) return Malformed("divisor is unknown");
  const auto nccl = DecodeNccl(options.nccl());
  if (!nccl.ok()) return nccl.status();
  OpenRequest request;
  request.options.nccl = *nccl;
  request.options.on_rank_loss = *policy;
  const std::uint64_t hold_ms =
      options.hold_timeout_ms() == 0 ? kHoldTimeoutMs : options.hold_timeout_ms();
  if (*policy == OnRankLoss::kHold) {
    request.options.hold_timeout_ns = std::min(hold_ms, kLongestMs) * kNsPerMs;
    const bool survivor = options.state_source() == v1::STATE_SOURCE_SURVIVOR;
    request.options.state_source = survivor ? StateSource::kSurvivor : StateSource::kTrainer;
  }
  request.job_id = message.job_id();
  request.token = message.token();
  request.rank = message.rank();
  request.world_size = message.world_size();
  request.options.divide_by_world = options.divisor() == v1::DIVISOR_WORLD;
  request.options.step_timeout_ns = std::min(options.step_timeout_ms(), kLongestMs) * kNsPerMs;
  request.client = message.client();
  request.coordinator = message.coordinator();
  const std::uint64_t patience_ms = message.timeout_ms() == 0 ? kPatienceMs : message.timeout_ms();
  request.patience_ns = std::min(patience_ms, kLongestPatienceMs) * kNsPerMs;
  if (!request.coordinator.empty()) {
    // It is kept as long as the session.
    auto kept = std::make_shared<v1::OpenSession>(WithoutUnknownFields(message));
    kept->clear_token();
    kept->clear_coordinator();
    request.message = std::move(kept);
  }
  return request;
}

absl::Status DecodeLayoutItems(const v1::LayoutPart& message, const DecodeLimits& limits,
                               LayoutItems* items) {
  return AddItems(message.parameters(), message.explicit_buckets(), limits, items);
}

absl::StatusOr<LayoutRequest> DecodeLayout(const v1::RegisterLayout& message, LayoutItems before,
                                           const DecodeLimits& limits, std::uint64_t now_ns) {
  LayoutRequest request;
  request.request_id = message.request_id();
  request.deadline_ns = DeadlineNs(message.timeout_ms(), kLayoutTimeoutMs, now_ns);
  request.bucket_done_messages = message.bucket_done_messages();
  request.replaces = message.replaces();
  LayoutSpec& spec = request.spec;
  if (absl::Status status = CheckName("name", message.name(), kMaxLayoutNameBytes); !status.ok())
    return status;
  spec.name = message.name();
  const auto op = DecodeOp(message.op());
  if (!op.ok()) return op.status();
  spec.op = *op;
  // Checks the form alone: the worker knows which UUIDs exist.
  if (!message.device().empty()) {
    if (absl::Status status = CheckName("device", message.device(), kMaxDeviceBytes); !status.ok())
      return status;
    request.device = message.device();
    request.mps = message.mps();
    spec.on_gpu = true;
  }
  if (message.bucket_cap_bytes() != 0) spec.bucket_cap_bytes = message.bucket_cap_bytes();
  if (message.first_bucket_cap_bytes() != 0) {
    spec.first_bucket_cap_bytes = message.first_bucket_cap_bytes();
  }
  spec.last_bucket_cap_bytes = message.last_bucket_cap_bytes();
  if (absl::Status status =
          AddItems(message.parameters(), message.explicit_buckets(), limits, &before);
      !status.ok()) {
    return status;
  }
  spec.parameters = std::move(before.parameters);
  spec.explicit_buckets = std::move(before.buckets);
  if (spec.parameters.empty() == spec.explicit_buckets.empty()) {
    return Malformed("give either parameters or explicit_buckets, not both");
  }
  std::uint64_t bytes = 0;
  absl::flat_hash_set<absl::string_view> names;
  for (const Parameter& parameter : spec.parameters) {
    const std::string field = absl::StrCat("parameter '", parameter.name, "'");
    if (!names.insert(parameter.name).second)
      return Malformed(absl::StrCat(field, " is given twice"));
    if (absl::Status status =
            CheckReduction(field, spec.op, parameter.dtype, ReducedMemory::kParameters);
        !status.ok()) {
      return status;
    }
    std::uint64_t count = 1;
    for (const std::uint64_t extent : parameter.shape) {
      if (extent != 0 && count > kMaxBytes / extent) {
        return Malformed(absl::StrCat(field, " is larger than 16 TiB"));
      }
      count *= extent;
    }
    if (absl::Status status = AddBytes(field, count, parameter.dtype, &bytes); !status.ok()) {
      return status;
    }
  }
  for (std::size_t i = 0; i < spec.explicit_buckets.size(); ++i) {
    const auto& [dtype, count] = spec.explicit_buckets[i];
    const std::string field = absl::StrCat("bucket ", i);
    const ReducedMemory memory = spec.on_gpu ? ReducedMemory::kGpu : ReducedMemory::kHost;
    if (absl::Status status = CheckReduction(field, spec.op, dtype, memory); !status.ok()) {
      return status;
    }
    if (absl::Status status = AddBytes(field, count, dtype, &bytes); !status.ok()) return status;
  }
  if (message.buffer_bytes() != 0) {
    if (spec.on_gpu) return Malformed("buffer_bytes are only for layouts in host memory");
    if (absl::Status status =
            AddBytes("buffer_bytes", message.buffer_bytes(), DataType::kUint8, &bytes);
        !status.ok()) {
      return status;
    }
    spec.buffer_bytes = message.buffer_bytes();
  }
  return request;
}

std::uint64_t DecodeStateTimeoutNs(const v1::FetchState& message) {
  return std::min(message.timeout_ms(), kLongestMs) * kNsPerMs;
}

absl::Status CheckStateOffer(const v1::StateOffer& message) {
  if (message.bytes() != 0 && message.bytes() <= kMaxBytes) return absl::OkStatus();
  return Malformed(absl::StrCat("StateOffer of ", message.bytes(), " bytes; 1 to 16 TiB allowed"));
}

absl::Status DecodeStateDigests(const v1::StateDigests& message, std::vector<StateDigest>* items) {
  for (const v1::StateDigest& item : message.items()) {
    const std::string field = absl::StrCat("StateDigests.items[", items->size(), "]");
    if (item.name().empty() || item.name().size() > kMaxStateNameBytes) {
      return Malformed(absl::StrCat(field, ": its name has ", item.name().size(), " bytes; 1 to ",
                                    kMaxStateNameBytes, " allowed"));
    }
    if (item.sha256().size() != kSha256Bytes) {
      return Malformed(absl::StrCat(field, " ('", item.name(), "'): its digest has ",
                                    item.sha256().size(), " bytes; ", kSha256Bytes, " expected"));
    }
    items->push_back({item.name(), item.sha256()});
  }
  return absl::OkStatus();
}

std::optional<Position> DecodePosition(const v1::BucketReady& message) {
  if (!message.has_position()) return std::nullopt;
  return Position{message.position().epoch(), message.position().batch()};
}

std::optional<Position> DecodePosition(const v1::EndStep& message) {
  if (!message.has_position()) return std::nullopt;
  return Position{message.position().epoch(), message.position().batch()};
}

absl::StatusOr<OperationRequest> DecodeBroadcast(const v1::Broadcast& message,
                                                 std::uint64_t now_ns) {
  if (message.bytes() > kMaxBytes) return Malformed("broadcast of more than 16 TiB");
  OperationRequest request;
  request.sequence = message.sequence();
  request.spec.kind = OperationKind::kBroadcast;
  request.spec.root = message.root();
  request.spec.bytes = message.bytes();
  request.uses_staging = message.bytes() > 0;
  request.deadline_ns = DeadlineNs(message.timeout_ms(), kOperationTimeoutMs, now_ns);
  return request;
}

absl::StatusOr<OperationRequest> DecodeBarrier(const v1::Barrier& message, std::uint64_t now_ns) {
  OperationRequest request;
  request.sequence = message.sequence();
  request.spec.kind = OperationKind::kBarrier;
  request.deadline_ns = DeadlineNs(message.timeout_ms(), kOperationTimeoutMs, now_ns);
  return request;
}

absl::StatusOr<OperationRequest> DecodeAllReduce(const v1::AllReduce& message,
                                                 std::uint64_t staging_bytes,
                                                 std::uint64_t now_ns) {
  OperationRequest request;
  request.sequence = message.sequence();
  request.spec.kind = OperationKind::kAllReduce;
  const auto dtype = DecodeType("all-reduce", message.dtype());
  if (!dtype.ok()) return dtype.status();
  request.spec.dtype = *dtype;
  if (message.count() > staging_bytes / ItemSize(*dtype)) {
    return Malformed(absl::StrCat("all-reduce of ", message.count(), " ", DataTypeName(*dtype),
                                  " does not fit the staging memory of ", staging_bytes,
                                  " bytes: register it as a layout, or raise staging_bytes"));
  }
  request.spec.count = message.count();
  const auto op = DecodeOp(message.op());
  if (!op.ok()) return op.status();
  request.spec.op = *op;
  if (absl::Status status = CheckReduction("all-reduce", *op, *dtype, ReducedMemory::kHost);
      !status.ok()) {
    return status;
  }
  request.uses_staging = message.count() > 0;
  request.deadline_ns = DeadlineNs(message.timeout_ms(), kOperationTimeoutMs, now_ns);
  return request;
}

}  // namespace gradsync::daemon
