// The C API (gradsync/gradsync.h) over the C++ one. Every function that may allocate catches what
// it throws.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"
#include "client/include/gradsync/gradsync.h"
#include "client/src/error.h"
#include "client/src/fork_guard.h"

struct gradsync_error {
  gradsync_code_t code;
  std::string message;
  std::string reason;
  std::vector<std::pair<std::string, std::string>> fields;
};
struct gradsync_session {
  std::unique_ptr<gradsync::Session> session;
};
struct gradsync_layout {
  std::unique_ptr<gradsync::Layout> layout;
};
struct gradsync_mapping {
  std::shared_ptr<const void> mapping;
};

namespace {

using gradsync::DataType;
using gradsync::ItemSize;
using gradsync::client::kMalformed;
using gradsync::client::MakeError;

// Memory may be short when this is needed.
gradsync_error_t* OutOfMemory() {
  static gradsync_error error{GRADSYNC_RESOURCE_EXHAUSTED, "out of memory", "MEMORY", {}};
  return &error;
}

gradsync_error_t* ErrorOf(const absl::Status& status) {
  if (status.ok()) return nullptr;
  auto error = std::make_unique<gradsync_error>();
  error->code = static_cast<gradsync_code_t>(status.code());
  error->message = std::string(status.message());
  error->reason = gradsync::ErrorReason(status);
  for (const char* field : {"job", "rank", "channel", "step", "bucket"}) {
    if (std::string value = gradsync::ErrorField(status, field); !value.empty()) {
      error->fields.emplace_back(field, std::move(value));
    }
  }
  return error.release();
}

// Runs `body`, which returns an absl::Status.
template <typename Body>
gradsync_error_t* Call(const Body& body) {
  try {
    return ErrorOf(body());
  } catch (...) {
    return OutOfMemory();
  }
}

absl::Status Malformed(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, kMalformed, what);
}

absl::Duration DurationOf(std::int64_t ns) {
  return ns == GRADSYNC_FOREVER ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
}

// `preferred` if the caller left the member 0.
template <typename Enum>
Enum EnumOr(std::int32_t value, Enum preferred) {
  if (value == 0) return preferred;
  // 255 is none of any enumeration's values, so that the C++ API refuses it.
  return static_cast<Enum>(value > 0 && value < 255 ? value : 255);
}

DataType DataTypeOf(std::int32_t value) { return EnumOr(value, DataType::kUnspecified); }

// Bytes that every release's struct has: struct_size, and storage behind it where there is one.
template <typename Struct>
constexpr std::size_t kSmallest = sizeof(std::size_t);
template <>
constexpr std::size_t kSmallest<gradsync_session_options_t> = sizeof(std::size_t) + sizeof(void*);
template <>
constexpr std::size_t kSmallest<gradsync_step_result_t> = sizeof(std::size_t) + sizeof(void*);
static_assert(GRADSYNC_LOWEST_LIVE_RANK == gradsync::kLowestLiveRank);
static_assert(offsetof(gradsync_session_options_t, storage) == sizeof(std::size_t));
static_assert(offsetof(gradsync_step_result_t, storage) == sizeof(std::size_t));

// The caller's struct as this version knows it: members beyond its struct_size are 0.
template <typename Struct>
absl::Status Read(const Struct* in, const char* name, Struct* out) {
  std::memset(static_cast<void*>(out), 0, sizeof(Struct));
  if (in == nullptr) return Malformed(absl::StrCat(name, " is NULL"));
  if (in->struct_size < kSmallest<Struct>) {
    return Malformed(absl::StrCat(name, ".struct_size is not set"));
  }
  std::memcpy(static_cast<void*>(out), in, std::min(in->struct_size, sizeof(Struct)));
  return absl::OkStatus();
}

// The other way round: what the caller's older struct has no room for is left out.
template <typename Struct>
void Write(Struct value, Struct* out) {
  value.struct_size = out->struct_size;
  std::memcpy(static_cast<void*>(out), &value, std::min(out->struct_size, sizeof(Struct)));
}

// Frees what `inout` points to, a Storage, and leaves it as after its _init(), however long it is.
template <typename Storage, typename Struct>
void Destroy(Struct* inout) {
  if (inout == nullptr || inout->struct_size < kSmallest<Struct>) return;
  delete static_cast<Storage*>(inout->storage);
  const std::size_t struct_size = inout->struct_size;
  std::memset(static_cast<void*>(inout), 0, struct_size);
  inout->struct_size = struct_size;
}

// What a gradsync_step_result points to.
struct StepResultStorage {
  gradsync::StepResult result;
  std::vector<std::uint8_t> used;
  std::vector<gradsync_bucket_times_t> buckets;
  std::vector<gradsync_bucket_numbers_t> numbers;
};

absl::StatusOr<gradsync::LayoutSpec> SpecOf(const gradsync_layout_spec_t* in) {
  gradsync_layout_spec_t spec;
  if (auto status = Read(in, "spec", &spec); !status.ok()) return status;
  if ((spec.parameters == nullptr && spec.parameter_count > 0) ||
      (spec.explicit_buckets == nullptr && spec.explicit_bucket_count > 0)) {
    return Malformed("spec.parameters or spec.explicit_buckets is NULL");
  }
  gradsync::LayoutSpec out;
  if (spec.name != nullptr) out.name = spec.name;
  for (std::size_t i = 0; i < spec.parameter_count; ++i) {
    const gradsync_parameter_t& parameter = spec.parameters[i];
    if (parameter.name == nullptr || (parameter.shape == nullptr && parameter.dimensions > 0)) {
      return Malformed(absl::StrCat("spec.parameters[", i, "] has no name or no shape"));
    }
    gradsync::ParameterSpec& added = out.parameters.emplace_back();
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
  out.op = EnumOr(spec.op, gradsync::ReduceOp::kAverage);
  if (spec.timeout != 0) out.timeout = DurationOf(spec.timeout);
  if (spec.device != nullptr) out.device = spec.device;
  return out;
}

// Empty: all are used.
std::vector<bool> UsedOf(const gradsync_layout_t* layout, const std::uint8_t* used) {
  if (used == nullptr) return {};
  return std::vector<bool>(used, used + layout->layout->parameter_count());
}

}  // namespace

std::uint32_t gradsync_abi_version(void) { return GRADSYNC_ABI_VERSION; }

// ---- Errors
// --------------------------------------------------------------------------------------

gradsync_code_t gradsync_error_code(const gradsync_error_t* error) {
  return error == nullptr ? GRADSYNC_OK : error->code;
}

const char* gradsync_error_message(const gradsync_error_t* error) {
  return error == nullptr ? "" : error->message.c_str();
}

const char* gradsync_error_reason(const gradsync_error_t* error) {
  return error == nullptr ? "" : error->reason.c_str();
}

const char* gradsync_error_field(const gradsync_error_t* error, const char* field) {
  if (error == nullptr || field == nullptr) return "";
  for (const auto& [name, value] : error->fields) {
    if (name == field) return value.c_str();
  }
  return "";
}

void gradsync_error_destroy(gradsync_error_t* error) {
  if (error != OutOfMemory()) delete error;
}

const char* gradsync_code_name(gradsync_code_t code) {
  constexpr const char* kNames[] = {"OK",
                                    "CANCELLED",
                                    "UNKNOWN",
                                    "INVALID_ARGUMENT",
                                    "DEADLINE_EXCEEDED",
                                    "NOT_FOUND",
                                    "ALREADY_EXISTS",
                                    "PERMISSION_DENIED",
                                    "RESOURCE_EXHAUSTED",
                                    "FAILED_PRECONDITION",
                                    "ABORTED",
                                    "OUT_OF_RANGE",
                                    "UNIMPLEMENTED",
                                    "INTERNAL",
                                    "UNAVAILABLE",
                                    "DATA_LOSS",
                                    "UNAUTHENTICATED"};
  const auto index = static_cast<unsigned>(code);
  return index < sizeof(kNames) / sizeof(kNames[0]) ? kNames[index] : "";
}

// ---- Joining a job
// -------------------------------------------------------------------------------

size_t gradsync_item_size(std::int32_t data_type) { return ItemSize(DataTypeOf(data_type)); }

gradsync_error_t* gradsync_session_options_from_environment(gradsync_session_options_t* options) {
  return Call([&]() -> absl::Status {
    gradsync_session_options_t filled;
    if (auto status = Read(options, "options", &filled); !status.ok()) return status;
    auto found = gradsync::SessionOptions::FromEnvironment();
    if (!found.ok()) return found.status();
    auto storage = std::make_unique<gradsync::SessionOptions>(*std::move(found));
    filled.socket = storage->socket.c_str();
    filled.job_id = storage->job_id.c_str();
    filled.token = storage->token.c_str();
    filled.coordinator = storage->coordinator.c_str();
    filled.rank = storage->rank;
    filled.world_size = storage->world_size;
    filled.storage = storage.release();
    Write(filled, options);
    return absl::OkStatus();
  });
}

void gradsync_session_options_destroy(gradsync_session_options_t* options) {
  Destroy<gradsync::SessionOptions>(options);
}

gradsync_error_t* gradsync_session_join(const gradsync_session_options_t* options,
                                        gradsync_session_t** session) {
  return Call([&]() -> absl::Status {
    gradsync_session_options_t in;
    if (auto status = Read(options, "options", &in); !status.ok()) return status;
    if (session == nullptr) return Malformed("session is NULL");
    gradsync::SessionOptions out;
    if (in.socket != nullptr) out.socket = in.socket;
    if (in.job_id != nullptr) out.job_id = in.job_id;
    if (in.token != nullptr) out.token = in.token;
    if (in.coordinator != nullptr) out.coordinator = in.coordinator;
    out.rank = in.rank;
    out.world_size = in.world_size;
    out.on_rank_loss = EnumOr(in.on_rank_loss, gradsync::LossPolicy::kAbort);
    out.divisor = EnumOr(in.divisor, gradsync::Divisor::kLiveRanks);
    out.step_timeout = DurationOf(in.step_timeout);
    out.nccl.max_ctas = in.nccl_max_ctas;
    out.nccl.algorithm = EnumOr(in.nccl_algorithm, gradsync::NcclAlgorithm::kAuto);
    out.nccl.protocol = EnumOr(in.nccl_protocol, gradsync::NcclProtocol::kAuto);
    out.nccl.wire_type = EnumOr(in.nccl_wire_type, gradsync::NcclWireType::kAuto);
    if (in.connect_timeout != 0) out.connect_timeout = DurationOf(in.connect_timeout);
    auto handle = std::make_unique<gradsync_session>();
    auto joined = gradsync::Session::Join(out);
    if (!joined.ok()) return joined.status();
    handle->session = *std::move(joined);
    *session = handle.release();
    return absl::OkStatus();
  });
}

void gradsync_session_destroy(gradsync_session_t* session) { delete session; }

std::uint32_t gradsync_session_rank(const gradsync_session_t* session) {
  return session->session->rank();
}

std::uint32_t gradsync_session_world_size(const gradsync_session_t* session) {
  return session->session->world_size();
}

std::uint64_t gradsync_session_generation(const gradsync_session_t* session) {
  return session->session->generation();
}

std::uint64_t gradsync_session_incarnation(const gradsync_session_t* session) {
  return session->session->incarnation();
}

// ---- Layouts
// -------------------------------------------------------------------------------------

gradsync_error_t* gradsync_register_layout(gradsync_session_t* session,
                                           const gradsync_layout_spec_t* spec,
                                           gradsync_layout_t** layout) {
  return Call([&]() -> absl::Status {
    const auto out = SpecOf(spec);
    if (!out.ok()) return out.status();
    if (session == nullptr || layout == nullptr) return Malformed("session or layout is NULL");
    auto handle = std::make_unique<gradsync_layout>();
    auto registered = session->session->RegisterLayout(*out);
    if (!registered.ok()) return registered.status();
    handle->layout = *std::move(registered);
    *layout = handle.release();
    return absl::OkStatus();
  });
}

gradsync_error_t* gradsync_replace_layout(gradsync_session_t* session, gradsync_layout_t* old,
                                          const gradsync_layout_spec_t* spec,
                                          gradsync_layout_t** layout) {
  return Call([&]() -> absl::Status {
    const auto out = SpecOf(spec);
    if (!out.ok()) return out.status();
    if (session == nullptr || old == nullptr || layout == nullptr) {
      return Malformed("session, old or layout is NULL");
    }
    auto handle = std::make_unique<gradsync_layout>();
    auto replaced = session->session->ReplaceLayout(*old->layout, *out);
    if (!replaced.ok()) return replaced.status();
    handle->layout = *std::move(replaced);
    *layout = handle.release();
    return absl::OkStatus();
  });
}

void gradsync_layout_destroy(gradsync_layout_t* layout) { delete layout; }

const char* gradsync_layout_name(const gradsync_layout_t* layout) {
  return layout->layout->name().c_str();
}

std::uint64_t gradsync_layout_fingerprint(const gradsync_layout_t* layout) {
  return layout->layout->fingerprint();
}

size_t gradsync_layout_bucket_count(const gradsync_layout_t* layout) {
  return layout->layout->bucket_count();
}

size_t gradsync_layout_parameter_count(const gradsync_layout_t* layout) {
  return layout->layout->parameter_count();
}

const char* gradsync_layout_device(const gradsync_layout_t* layout) {
  return layout->layout->device().c_str();
}

gradsync_error_t* gradsync_layout_bucket(const gradsync_layout_t* layout, size_t bucket,
                                         gradsync_view_t* view) {
  return Call([&]() -> absl::Status {
    if (bucket >= layout->layout->bucket_count()) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, gradsync::client::kUnknownBucket,
          absl::StrCat("layout '", layout->layout->name(), "' has ", layout->layout->bucket_count(),
                       " buckets, no bucket ", bucket));
    }
    const gradsync::BucketView found = layout->layout->bucket(bucket);
    *view = {found.data, found.count, static_cast<std::uint32_t>(bucket),
             static_cast<std::int32_t>(found.dtype)};
    return absl::OkStatus();
  });
}

gradsync_error_t* gradsync_layout_gradient(const gradsync_layout_t* layout, size_t parameter,
                                           gradsync_view_t* view) {
  return Call([&]() -> absl::Status {
    if (parameter >= layout->layout->parameter_count()) {
      return Malformed(absl::StrCat("layout '", layout->layout->name(), "' has ",
                                    layout->layout->parameter_count(), " parameters, no parameter ",
                                    parameter));
    }
    const gradsync::GradientView found = layout->layout->gradient(parameter);
    *view = {found.data, found.count, found.bucket, static_cast<std::int32_t>(found.dtype)};
    return absl::OkStatus();
  });
}

gradsync_error_t* gradsync_layout_mapping(const gradsync_layout_t* layout,
                                          gradsync_mapping_t** mapping) {
  return Call([&]() -> absl::Status {
    *mapping = new gradsync_mapping{layout->layout->Mapping()};
    return absl::OkStatus();
  });
}

void gradsync_mapping_destroy(gradsync_mapping_t* mapping) {
  if (!gradsync::client::InForkedChild()) delete mapping;
}

// ---- Steps
// ---------------------------------------------------------------------------------------

std::uint64_t gradsync_next_step(const gradsync_layout_t* layout) {
  return layout->layout->next_step();
}

gradsync_error_t* gradsync_mark_unused(gradsync_layout_t* layout, std::uint64_t step,
                                       size_t parameter) {
  return Call([&] { return layout->layout->MarkUnused(step, parameter); });
}

gradsync_error_t* gradsync_mark_ready(gradsync_layout_t* layout, std::uint64_t step,
                                      size_t bucket) {
  return Call([&] { return layout->layout->MarkReady(step, bucket); });
}

gradsync_error_t* gradsync_end_step(gradsync_layout_t* layout, std::uint64_t step,
                                    const std::uint8_t* used) {
  return Call([&] { return layout->layout->EndStep(step, UsedOf(layout, used)); });
}

gradsync_error_t* gradsync_finish_step(gradsync_layout_t* layout, std::uint64_t step,
                                       const std::uint8_t* used) {
  return Call([&] { return layout->layout->FinishStep(step, UsedOf(layout, used)); });
}

gradsync_error_t* gradsync_mark_ready_on_streams(gradsync_layout_t* layout, std::uint64_t step,
                                                 size_t bucket, void* const* streams,
                                                 size_t stream_count) {
  return Call([&] { return layout->layout->MarkReady(step, bucket, {streams, stream_count}); });
}

gradsync_error_t* gradsync_finish_step_on_streams(gradsync_layout_t* layout, std::uint64_t step,
                                                  const std::uint8_t* used, void* const* streams,
                                                  size_t stream_count) {
  return Call([&] {
    return layout->layout->FinishStep(step, UsedOf(layout, used), {streams, stream_count});
  });
}

gradsync_error_t* gradsync_wait_on_stream(gradsync_layout_t* layout, std::uint64_t step,
                                          size_t bucket, void* stream) {
  return Call([&] {
    return bucket == GRADSYNC_EVERY_BUCKET ? layout->layout->WaitOnStream(step, stream)
                                           : layout->layout->WaitOnStream(step, bucket, stream);
  });
}

const float* gradsync_device_verdict(const gradsync_layout_t* layout, std::uint64_t step) {
  return layout->layout->device_verdict(step);
}

gradsync_error_t* gradsync_cuda_device_uuid(std::int32_t ordinal,
                                            char uuid[GRADSYNC_DEVICE_UUID_SIZE]) {
  return Call([&]() -> absl::Status {
    const auto found = gradsync::CudaDeviceUuid(ordinal);
    if (!found.ok()) return found.status();
    const std::size_t copied = found->copy(uuid, GRADSYNC_DEVICE_UUID_SIZE - 1);
    uuid[copied] = '\0';
    return absl::OkStatus();
  });
}

gradsync_error_t* gradsync_abandon_step(gradsync_layout_t* layout, std::uint64_t step,
                                        const char* reason) {
  return Call([&] { return layout->layout->AbandonStep(step, reason == nullptr ? "" : reason); });
}

gradsync_error_t* gradsync_wait_bucket(gradsync_layout_t* layout, std::uint64_t step, size_t bucket,
                                       std::int64_t timeout) {
  return Call([&] { return layout->layout->WaitBucket(step, bucket, DurationOf(timeout)); });
}

gradsync_error_t* gradsync_wait_step(gradsync_layout_t* layout, std::uint64_t step,
                                     std::int64_t timeout, gradsync_step_result_t* result) {
  return Call([&]() -> absl::Status {
    gradsync_step_result_t filled;
    if (result != nullptr) {
      if (auto status = Read(result, "result", &filled); !status.ok()) return status;
    }
    auto waited = layout->layout->WaitStep(step, DurationOf(timeout));
    if (!waited.ok()) return waited.status();
    if (result == nullptr) return absl::OkStatus();
    auto storage = std::make_unique<StepResultStorage>();
    storage->result = *std::move(waited);
    storage->used.assign(storage->result.used.begin(), storage->result.used.end());
    for (const gradsync::BucketTimes& times : storage->result.buckets) {
      storage->buckets.push_back(
          {times.ready_ns.data(), times.ready_ns.size(), times.start_ns, times.finish_ns});
    }
    for (const gradsync::BucketNumbers& numbers : storage->result.numbers) {
      storage->numbers.push_back({numbers.sum_of_squares, numbers.non_finite});
    }
    filled.step = storage->result.step;
    filled.live_ranks = storage->result.live_ranks;
    filled.divisor = storage->result.divisor;
    filled.used = storage->used.empty() ? nullptr : storage->used.data();
    filled.used_count = storage->used.size();
    filled.buckets = storage->buckets.data();
    filled.bucket_count = storage->buckets.size();
    filled.numbers = storage->numbers.empty() ? nullptr : storage->numbers.data();
    filled.number_count = storage->numbers.size();
    filled.storage = storage.release();
    Write(filled, result);
    return absl::OkStatus();
  });
}

void gradsync_step_result_destroy(gradsync_step_result_t* result) {
  Destroy<StepResultStorage>(result);
}

double gradsync_gradient_norm(const gradsync_step_result_t* result) {
  constexpr std::size_t kNeeded =
      offsetof(gradsync_step_result_t, number_count) + sizeof(result->number_count);
  if (result == nullptr || result->struct_size < kNeeded || result->number_count == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  double sum_of_squares = 0;
  for (std::size_t i = 0; i < result->number_count; ++i) {
    sum_of_squares += result->numbers[i].sum_of_squares;
  }
  return std::sqrt(sum_of_squares);
}

double gradsync_clip_coefficient(double norm, double max_norm) {
  return gradsync::ClipCoefficient(norm, max_norm);
}

// ---- The job's own operations
// --------------------------------------------------------------------

gradsync_error_t* gradsync_barrier(gradsync_session_t* session, std::int64_t timeout) {
  return Call([&] { return session->session->Barrier(DurationOf(timeout)); });
}

gradsync_error_t* gradsync_broadcast(gradsync_session_t* session, void* data, size_t bytes,
                                     std::uint32_t root, std::int64_t timeout) {
  return Call([&] { return session->session->Broadcast(data, bytes, root, DurationOf(timeout)); });
}

gradsync_error_t* gradsync_all_reduce(gradsync_session_t* session, void* data, size_t count,
                                      std::int32_t data_type, std::int32_t op,
                                      std::int64_t timeout) {
  return Call([&] {
    return session->session->AllReduce(data, count, DataTypeOf(data_type),
                                       EnumOr(op, gradsync::ReduceOp::kAverage),
                                       DurationOf(timeout));
  });
}

gradsync_error_t* gradsync_session_leave(gradsync_session_t* session) {
  return Call([&] { return session->session->Leave(); });
}

gradsync_error_t* gradsync_session_leave_and_stay(gradsync_session_t* session, std::int64_t timeout,
                                                  std::uint32_t* last_joiner) {
  return Call([&]() -> absl::Status {
    const auto last = session->session->LeaveAndStay(DurationOf(timeout));
    if (!last.ok()) return last.status();
    if (last_joiner != nullptr) *last_joiner = *last;
    return absl::OkStatus();
  });
}

void gradsync_session_statistics(const gradsync_session_t* session,
                                 gradsync_statistics_t* statistics) {
  const gradsync::SessionStatistics found = session->session->Statistics();
  gradsync_statistics_t out{};
  out.steps_complete = found.steps_complete;
  out.steps_void = found.steps_void;
  out.buckets_marked = found.buckets_marked;
  out.bytes_reduced = found.bytes_reduced;
  out.mark_ready_total = absl::ToInt64Nanoseconds(found.mark_ready_total);
  out.exposed_total = absl::ToInt64Nanoseconds(found.exposed_total);
  Write(out, statistics);
}
