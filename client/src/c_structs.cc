#include "client/src/c_structs.h"

#include <memory>
#include <utility>
#include <vector>

#include "client/src/error.h"
#include "gradsync/limits.h"

namespace gradsync::c_api {
namespace {

static_assert(GRADSYNC_LOWEST_LIVE_RANK == kLowestLiveRank);
static_assert(kLowestLiveRank == kRootIsLowestLive);
static_assert(offsetof(gradsync_session_options_t, storage) == sizeof(std::size_t));
static_assert(offsetof(gradsync_step_result_t, storage) == sizeof(std::size_t));

// What a gradsync_step_result_t points to.
struct StepResultStorage {
  StepResult result;
  std::vector<std::uint8_t> used;
  std::vector<gradsync_bucket_times_t> buckets;
  std::vector<gradsync_gradient_stats_t> stats;
};

}  // namespace

absl::Status Malformed(absl::string_view what) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, reason::kMalformed, what);
}

absl::Duration DurationOf(std::int64_t ns) {
  return ns == GRADSYNC_FOREVER ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
}

absl::StatusOr<SessionOptions> ReadOptions(const gradsync_session_options_t* options) {
  gradsync_session_options_t in;
  if (auto status = Read(options, "options", &in); !status.ok()) return status;
  SessionOptions out;
  if (in.socket != nullptr) out.socket = in.socket;
  if (in.job_id != nullptr) out.job_id = in.job_id;
  if (in.token != nullptr) out.token = in.token;
  if (in.coordinator != nullptr) out.coordinator = in.coordinator;
  out.rank = in.rank;
  out.world_size = in.world_size;
  out.on_rank_loss = EnumOr(in.on_rank_loss, LossPolicy::kAbort);
  out.divisor = EnumOr(in.divisor, Divisor::kLiveRanks);
  out.step_timeout = DurationOf(in.step_timeout);
  out.hold_timeout = DurationOf(in.hold_timeout);
  out.state_source = EnumOr(in.state_source, StateSource::kSurvivor);
  out.nccl.max_ctas = in.nccl_max_ctas;
  out.nccl.algorithm = EnumOr(in.nccl_algorithm, NcclAlgorithm::kAuto);
  out.nccl.protocol = EnumOr(in.nccl_protocol, NcclProtocol::kAuto);
  out.nccl.wire_type = EnumOr(in.nccl_wire_type, NcclWireType::kAuto);
  if (in.connect_timeout != 0) out.connect_timeout = DurationOf(in.connect_timeout);
  return out;
}

GivenOptions GivenIn(const gradsync_session_options_t& header) {
  GivenOptions given;
  if (header.socket != nullptr) given.socket = header.socket;
  if (header.job_id != nullptr) given.job_id = header.job_id;
  if (header.token != nullptr) given.token = header.token;
  if (header.coordinator != nullptr) given.coordinator = header.coordinator;
  if (header.rank_given != 0) given.rank = header.rank;
  if (header.world_size != 0) given.world_size = header.world_size;
  return given;
}

void WriteOptions(SessionOptions options, gradsync_session_options_t header,
                  gradsync_session_options_t* out) {
  auto storage = std::make_unique<SessionOptions>(std::move(options));
  header.socket = storage->socket.c_str();
  header.job_id = storage->job_id.c_str();
  header.token = storage->token.c_str();
  header.coordinator = storage->coordinator.c_str();
  header.rank = storage->rank;
  header.world_size = storage->world_size;
  header.storage = storage.release();
  Write(header, out);
}

void DestroyOptions(gradsync_session_options_t* options) { Destroy<SessionOptions>(options); }

absl::StatusOr<LayoutSpec> ReadSpec(const gradsync_layout_spec_t* in) {
  gradsync_layout_spec_t spec;
  if (auto status = Read(in, "spec", &spec); !status.ok()) return status;
  if ((spec.parameters == nullptr && spec.parameter_count > 0) ||
      (spec.explicit_buckets == nullptr && spec.explicit_bucket_count > 0)) {
    return Malformed("spec.parameters or spec.explicit_buckets is NULL");
  }
  LayoutSpec out;
  if (spec.name != nullptr) out.name = spec.name;
  for (std::size_t i = 0; i < spec.parameter_count; ++i) {
    const gradsync_parameter_t& parameter = spec.parameters[i];
    if (parameter.name == nullptr || (parameter.shape == nullptr && parameter.dimensions > 0)) {
      return Malformed(absl::StrCat("spec.parameters[", i, "] has no name or no shape"));
    }
    ParameterSpec& added = out.parameters.emplace_back();
    added.name = parameter.name;
    if (parameter.dimensions > 0) {
      added.shape.assign(parameter.shape, parameter.shape + parameter.dimensions);
    }
    added.dtype = DataTypeOf(parameter.data_type);
  }
  for (std::size_t i = 0; i < spec.explicit_bucket_count; ++i) {
    out.explicit_buckets.push_back(
        {DataTypeOf(spec.explicit_buckets[i].data_type), spec.explicit_buckets[i].count});
  }
  if (spec.bucket_cap_bytes != 0) out.bucket_cap_bytes = spec.bucket_cap_bytes;
  if (spec.first_bucket_cap_bytes != 0) out.first_bucket_cap_bytes = spec.first_bucket_cap_bytes;
  out.last_bucket_cap_bytes = spec.last_bucket_cap_bytes;
  out.op = EnumOr(spec.op, ReduceOp::kAverage);
  if (spec.timeout != 0) out.timeout = DurationOf(spec.timeout);
  if (spec.device != nullptr) out.device = spec.device;
  out.buffer_bytes = spec.buffer_bytes;
  return out;
}

SpecStorage::SpecStorage(LayoutSpec spec) : spec_(std::move(spec)) {
  for (const ParameterSpec& parameter : spec_.parameters) {
    parameters_.push_back({parameter.name.c_str(), parameter.shape.data(), parameter.shape.size(),
                           static_cast<std::int32_t>(parameter.dtype)});
  }
  for (const BucketSpec& bucket : spec_.explicit_buckets) {
    buckets_.push_back({bucket.count, static_cast<std::int32_t>(bucket.dtype)});
  }
}

void SpecStorage::Write(gradsync_layout_spec_t* out) const {
  gradsync_layout_spec_t value{};
  value.name = spec_.name.c_str();
  value.parameters = parameters_.data();
  value.parameter_count = parameters_.size();
  value.explicit_buckets = buckets_.data();
  value.explicit_bucket_count = buckets_.size();
  value.bucket_cap_bytes = spec_.bucket_cap_bytes;
  value.first_bucket_cap_bytes = spec_.first_bucket_cap_bytes;
  value.last_bucket_cap_bytes = spec_.last_bucket_cap_bytes;
  value.op = static_cast<std::int32_t>(spec_.op);
  value.buffer_bytes = spec_.buffer_bytes;
  c_api::Write(value, out);
}

absl::StatusOr<std::vector<StateItem>> ReadItems(const gradsync_state_item_t* items,
                                                 std::size_t count) {
  if (items == nullptr && count > 0) return Malformed("items is NULL");
  std::vector<StateItem> out;
  out.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (items[i].name == nullptr) return Malformed(absl::StrCat("items[", i, "] has no name"));
    out.push_back({items[i].name, items[i].data, items[i].bytes});
  }
  return out;
}

namespace {

// A program's functions. Immutable, so thread-safe.
class CallbackState final : public TrainerState {
 public:
  explicit CallbackState(const gradsync_state_reader_t& reader) : reader_(reader) {}

  absl::StatusOr<std::vector<StateItem>> Read() override {
    const gradsync_state_item_t* items = nullptr;
    std::size_t count = 0;
    char reason[GRADSYNC_STATE_REASON_SIZE] = "";
    if (reader_.read(reader_.user, &items, &count, reason) != 0) {
      reason[sizeof(reason) - 1] = '\0';
      return client::MakeError(absl::StatusCode::kFailedPrecondition, reason::kStateRefused,
                               reason[0] == '\0' ? "read() failed and gave no reason" : reason);
    }
    auto read = ReadItems(items, count);
    if (!read.ok()) Done();
    return read;
  }

  void Done() override {
    if (reader_.done != nullptr) reader_.done(reader_.user);
  }

 private:
  const gradsync_state_reader_t reader_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TrainerState>> ReadReader(const gradsync_state_reader_t* in) {
  gradsync_state_reader_t reader;
  if (auto status = Read(in, "reader", &reader); !status.ok()) return status;
  if (reader.read == nullptr) return Malformed("reader.read is NULL");
  return std::make_shared<CallbackState>(reader);
}

void WriteResult(StepResult result, gradsync_step_result_t header, gradsync_step_result_t* out) {
  auto storage = std::make_unique<StepResultStorage>();
  storage->result = std::move(result);
  storage->used.assign(storage->result.used.begin(), storage->result.used.end());
  for (const BucketTimes& times : storage->result.buckets) {
    storage->buckets.push_back(
        {times.ready_ns.data(), times.ready_ns.size(), times.start_ns, times.finish_ns});
  }
  for (const GradientStats& stats : storage->result.stats) {
    storage->stats.push_back({stats.sum_of_squares, stats.non_finite});
  }
  header.step = storage->result.step;
  header.live_ranks = storage->result.live_ranks;
  header.divisor = storage->result.divisor;
  header.used = storage->used.empty() ? nullptr : storage->used.data();
  header.used_count = storage->used.size();
  header.buckets = storage->buckets.data();
  header.bucket_count = storage->buckets.size();
  header.stats = storage->stats.empty() ? nullptr : storage->stats.data();
  header.stats_count = storage->stats.size();
  header.storage = storage.release();
  Write(header, out);
}

void DestroyResult(gradsync_step_result_t* result) { Destroy<StepResultStorage>(result); }

void WriteStatistics(const SessionStatistics& statistics, gradsync_statistics_t* out) {
  gradsync_statistics_t value{};
  value.steps_complete = statistics.steps_complete;
  value.steps_void = statistics.steps_void;
  value.buckets_marked = statistics.buckets_marked;
  value.bytes_reduced = statistics.bytes_reduced;
  value.mark_ready_total = absl::ToInt64Nanoseconds(statistics.mark_ready_total);
  value.exposed_total = absl::ToInt64Nanoseconds(statistics.exposed_total);
  Write(value, out);
}

}  // namespace gradsync::c_api
