// The functions of the C API (gradsync/gradsync.h) on top of the C++ API. Every function that may
// allocate catches std::bad_alloc.

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/include/gradsync/client.h"
#include "client/include/gradsync/gradsync.h"
#include "client/src/c_structs.h"
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
struct gradsync_current_layouts {
  std::vector<std::unique_ptr<gradsync::c_api::SpecStorage>> specs;
  std::vector<std::uint64_t> steps;
};
struct gradsync_state_image {
  gradsync::StateImage image;
};
struct gradsync_mapping {
  std::shared_ptr<const void> mapping;
};

namespace {

using gradsync::c_api::DataTypeOf;
using gradsync::c_api::DurationOf;
using gradsync::c_api::EnumOr;
using gradsync::c_api::Malformed;
using gradsync::client::MakeError;

// Allocates nothing.
gradsync_error_t* OutOfMemory() {
  static gradsync_error error{GRADSYNC_RESOURCE_EXHAUSTED,
                              "out of memory",
                              std::string(gradsync::reason::kMemory.text()),
                              {}};
  return &error;
}

gradsync_error_t* ErrorOf(const absl::Status& status) {
  if (status.ok()) return nullptr;
  auto error = std::make_unique<gradsync_error>();
  error->code = static_cast<gradsync_code_t>(status.code());
  error->message = std::string(status.message());
  error->reason = gradsync::ErrorReason(status);
  namespace field = gradsync::field;
  for (const gradsync::FieldName name :
       {field::kJob, field::kRank, field::kChannel, field::kStep, field::kBucket}) {
    if (std::string value = gradsync::ErrorField(status, name); !value.empty()) {
      error->fields.emplace_back(name.text(), std::move(value));
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

// One flag per parameter; empty: all are used.
std::vector<bool> UsedOf(const gradsync_layout_t* layout, const std::uint8_t* used) {
  if (used == nullptr) return {};
  return std::vector<bool>(used, used + layout->layout->parameter_count());
}

}  // namespace

std::uint32_t gradsync_abi_version(void) { return GRADSYNC_ABI_VERSION; }

// ---- Errors -------------------------------------------------------------------------------------

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

// ---- Joining a job ------------------------------------------------------------------------------

size_t gradsync_item_size(std::int32_t data_type) {
  return gradsync::ItemSize(DataTypeOf(data_type));
}

gradsync_error_t* gradsync_session_options_from_environment(gradsync_session_options_t* options) {
  return Call([&]() -> absl::Status {
    gradsync_session_options_t header;
    if (auto status = gradsync::c_api::Read(options, "options", &header); !status.ok()) {
      return status;
    }
    auto found = gradsync::SessionOptions::FromEnvironment(gradsync::c_api::GivenIn(header));
    if (!found.ok()) return found.status();
    gradsync::c_api::WriteOptions(*std::move(found), header, options);
    return absl::OkStatus();
  });
}

void gradsync_session_options_destroy(gradsync_session_options_t* options) {
  gradsync::c_api::DestroyOptions(options);
}

gradsync_error_t* gradsync_session_join(const gradsync_session_options_t* options,
                                        gradsync_session_t** session) {
  return Call([&]() -> absl::Status {
    const auto out = gradsync::c_api::ReadOptions(options);
    if (!out.ok()) return out.status();
    if (session == nullptr) return Malformed("session is NULL");
    auto handle = std::make_unique<gradsync_session>();
    auto joined = gradsync::Session::Join(*out);
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

int gradsync_session_is_replacement(const gradsync_session_t* session) {
  return session->session->is_replacement() ? 1 : 0;
}

// ---- Layouts ------------------------------------------------------------------------------------

gradsync_error_t* gradsync_register_layout(gradsync_session_t* session,
                                           const gradsync_layout_spec_t* spec,
                                           gradsync_layout_t** layout) {
  return Call([&]() -> absl::Status {
    const auto out = gradsync::c_api::ReadSpec(spec);
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
    const auto out = gradsync::c_api::ReadSpec(spec);
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

gradsync_error_t* gradsync_layout_release(gradsync_layout_t* layout) {
  return Call([&] { return layout->layout->Release(); });
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
          absl::StatusCode::kInvalidArgument, gradsync::reason::kUnknownBucket,
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

gradsync_error_t* gradsync_layout_buffers(const gradsync_layout_t* layout, gradsync_view_t* view) {
  return Call([&]() -> absl::Status {
    const gradsync::BucketView found = layout->layout->buffers();
    const std::size_t last = layout->layout->bucket_count() - 1;
    *view = {found.data, found.count, static_cast<std::uint32_t>(last),
             static_cast<std::int32_t>(found.dtype)};
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

// ---- Steps --------------------------------------------------------------------------------------

std::uint64_t gradsync_first_step(const gradsync_layout_t* layout) {
  return layout->layout->first_step();
}

std::uint64_t gradsync_next_step(const gradsync_layout_t* layout) {
  return layout->layout->next_step();
}

void gradsync_set_position(gradsync_layout_t* layout, std::uint64_t epoch, std::uint64_t batch) {
  layout->layout->SetPosition({epoch, batch});
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
    gradsync_step_result_t header;
    if (result != nullptr) {
      auto status = gradsync::c_api::Read(result, "result", &header);
      if (!status.ok()) return status;
    }
    auto waited = layout->layout->WaitStep(step, DurationOf(timeout));
    if (!waited.ok()) return waited.status();
    if (result != nullptr) gradsync::c_api::WriteResult(*std::move(waited), header, result);
    return absl::OkStatus();
  });
}

void gradsync_step_result_destroy(gradsync_step_result_t* result) {
  gradsync::c_api::DestroyResult(result);
}

double gradsync_gradient_norm(const gradsync_step_result_t* result) {
  constexpr std::size_t kNeeded =
      offsetof(gradsync_step_result_t, stats_count) + sizeof(result->stats_count);
  if (result == nullptr || result->struct_size < kNeeded || result->stats_count == 0) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  double sum_of_squares = 0;
  for (std::size_t i = 0; i < result->stats_count; ++i) {
    sum_of_squares += result->stats[i].sum_of_squares;
  }
  return std::sqrt(sum_of_squares);
}

double gradsync_clip_coefficient(double norm, double max_norm) {
  return gradsync::ClipCoefficient(norm, max_norm);
}

// ---- The state of the model ---------------------------------------------------------------------

gradsync_error_t* gradsync_serve_state(gradsync_session_t* session,
                                       const gradsync_state_reader_t* reader) {
  return Call([&]() -> absl::Status {
    if (reader == nullptr) return session->session->ServeState(nullptr);
    auto read = gradsync::c_api::ReadReader(reader);
    if (!read.ok()) return read.status();
    return session->session->ServeState(*std::move(read));
  });
}

gradsync_error_t* gradsync_pause_state(gradsync_session_t* session) {
  return Call([&] { return session->session->PauseState(); });
}

uint64_t gradsync_state_pauses(const gradsync_session_t* session) {
  return session->session->StatePauses();
}

void gradsync_call_began(gradsync_session_t* session, uint64_t pauses) {
  session->session->CallBegan(pauses);
}

gradsync_error_t* gradsync_get_current_layouts(const gradsync_session_t* session,
                                               gradsync_current_layouts_t** layouts) {
  return Call([&]() -> absl::Status {
    auto found = std::make_unique<gradsync_current_layouts>();
    for (gradsync::CurrentLayout& current : session->session->CurrentLayouts()) {
      found->specs.push_back(
          std::make_unique<gradsync::c_api::SpecStorage>(std::move(current.spec)));
      found->steps.push_back(current.step);
    }
    *layouts = found.release();
    return absl::OkStatus();
  });
}

size_t gradsync_current_layouts_count(const gradsync_current_layouts_t* layouts) {
  return layouts->specs.size();
}

gradsync_error_t* gradsync_current_layouts_get(const gradsync_current_layouts_t* layouts,
                                               size_t index, gradsync_layout_spec_t* spec,
                                               std::uint64_t* step) {
  return Call([&]() -> absl::Status {
    if (index >= layouts->specs.size()) {
      return Malformed(
          absl::StrCat("there are ", layouts->specs.size(), " current layouts, no layout ", index));
    }
    gradsync_layout_spec_t header;
    if (auto status = gradsync::c_api::Read(spec, "spec", &header); !status.ok()) return status;
    layouts->specs[index]->Write(spec);
    if (step != nullptr) *step = layouts->steps[index];
    return absl::OkStatus();
  });
}

void gradsync_current_layouts_destroy(gradsync_current_layouts_t* layouts) { delete layouts; }

gradsync_error_t* gradsync_fetch_state(gradsync_session_t* session, std::int64_t timeout,
                                       gradsync_state_image_t** image) {
  return Call([&]() -> absl::Status {
    auto found = std::make_unique<gradsync_state_image>();
    auto fetched = session->session->FetchState(DurationOf(timeout));
    if (!fetched.ok()) return fetched.status();
    found->image = *std::move(fetched);
    *image = found.release();
    return absl::OkStatus();
  });
}

std::uint32_t gradsync_state_image_source(const gradsync_state_image_t* image) {
  return image->image.source;
}

size_t gradsync_state_image_count(const gradsync_state_image_t* image) {
  return image->image.items.size();
}

gradsync_error_t* gradsync_state_image_item(const gradsync_state_image_t* image, size_t index,
                                            gradsync_state_item_t* item) {
  return Call([&]() -> absl::Status {
    if (index >= image->image.items.size()) {
      return Malformed(
          absl::StrCat("the state has ", image->image.items.size(), " items, no item ", index));
    }
    const gradsync::StateImage::Item& found = image->image.items[index];
    *item = {found.name.c_str(), found.data.data(), found.data.size()};
    return absl::OkStatus();
  });
}

void gradsync_state_image_destroy(gradsync_state_image_t* image) { delete image; }

gradsync_error_t* gradsync_confirm_state(gradsync_session_t* session, std::int64_t timeout) {
  return Call([&] { return session->session->ConfirmState(DurationOf(timeout)); });
}

gradsync_error_t* gradsync_check_in_sync(gradsync_session_t* session,
                                         const gradsync_state_item_t* items, size_t count,
                                         std::int64_t timeout) {
  return Call([&]() -> absl::Status {
    const auto read = gradsync::c_api::ReadItems(items, count);
    if (!read.ok()) return read.status();
    return session->session->CheckInSync(*read, DurationOf(timeout));
  });
}

// ---- The job's own operations -------------------------------------------------------------------

gradsync_error_t* gradsync_begin_collective(gradsync_session_t* session, const char* description) {
  return Call(
      [&] { return session->session->BeginCollective(description == nullptr ? "" : description); });
}

gradsync_error_t* gradsync_query_collectives(gradsync_session_t* session, std::int64_t waited) {
  return Call([&] { return session->session->QueryCollectives(absl::Nanoseconds(waited)); });
}

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

gradsync_error_t* gradsync_session_finish(gradsync_session_t* session) {
  return Call([&] { return session->session->Finish(); });
}

size_t gradsync_session_take_notice(gradsync_session_t* session, char* text, size_t size) {
  if (text == nullptr || size == 0) return 0;
  const std::string notice = session->session->TakeNotice();
  const std::size_t length = notice.copy(text, size - 1);
  text[length] = '\0';
  return length;
}

int gradsync_session_has_ended(const gradsync_session_t* session) {
  return session->session->HasEnded() ? 1 : 0;
}

gradsync_error_t* gradsync_session_await_end(gradsync_session_t* session, std::int64_t timeout) {
  return Call([&] { return session->session->AwaitEnd(DurationOf(timeout)); });
}

gradsync_error_t* gradsync_session_leave_and_stay(gradsync_session_t* session, std::int64_t timeout,
                                                  std::uint32_t* last_to_leave) {
  return Call([&]() -> absl::Status {
    const auto last = session->session->LeaveAndStay(DurationOf(timeout));
    if (!last.ok()) return last.status();
    if (last_to_leave != nullptr) *last_to_leave = *last;
    return absl::OkStatus();
  });
}

void gradsync_session_statistics(const gradsync_session_t* session,
                                 gradsync_statistics_t* statistics) {
  gradsync::c_api::WriteStatistics(session->session->Statistics(), statistics);
}
