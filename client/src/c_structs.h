// Converts between the structs of the C API and those of the C++ API.
//
// A struct that begins with `struct_size` may come from a program with an older or a newer header
// (gradsync/gradsync.h, "Compatibility"). So such a struct is copied in and out, and never read in
// place.

#ifndef CLIENT_SRC_C_STRUCTS_H_
#define CLIENT_SRC_C_STRUCTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/include/gradsync/client.h"
#include "client/include/gradsync/gradsync.h"

namespace gradsync::c_api {

// INVALID_ARGUMENT MALFORMED.
absl::Status Malformed(absl::string_view what);

// ---- Values

absl::Duration DurationOf(std::int64_t ns);

// `preferred` if `value` is 0.
template <typename Enum>
Enum EnumOr(std::int32_t value, Enum preferred) {
  if (value == 0) return preferred;
  // No enumeration has the value 255, so the C++ API refuses it.
  return static_cast<Enum>(value > 0 && value < 255 ? value : 255);
}

inline DataType DataTypeOf(std::int32_t value) { return EnumOr(value, DataType::kUnspecified); }

// ---- Structs that may grow

// The smallest struct of any release: struct_size and, where it exists, storage.
template <typename Struct>
constexpr std::size_t kSmallest = sizeof(std::size_t);
template <>
inline constexpr std::size_t kSmallest<gradsync_session_options_t> = sizeof(std::size_t) +
                                                                     sizeof(void*);
template <>
inline constexpr std::size_t kSmallest<gradsync_step_result_t> = sizeof(std::size_t) +
                                                                 sizeof(void*);

// Copies the caller's struct. Members beyond its struct_size are 0.
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

// Copies `value` to the caller's struct, up to its struct_size.
template <typename Struct>
void Write(Struct value, Struct* out) {
  value.struct_size = out->struct_size;
  std::memcpy(static_cast<void*>(out), &value, std::min(out->struct_size, sizeof(Struct)));
}

// Frees the Storage of `inout`, and sets `inout` as its _init() does, up to its struct_size.
template <typename Storage, typename Struct>
void Destroy(Struct* inout) {
  if (inout == nullptr || inout->struct_size < kSmallest<Struct>) return;
  delete static_cast<Storage*>(inout->storage);
  const std::size_t struct_size = inout->struct_size;
  std::memset(static_cast<void*>(inout), 0, struct_size);
  inout->struct_size = struct_size;
}

// ---- Each struct

// Below, `header` is the copy of the caller's struct `out` that Read made.

absl::StatusOr<SessionOptions> ReadOptions(const gradsync_session_options_t* options);
// The options that are set in `header`, for _from_environment().
GivenOptions GivenIn(const gradsync_session_options_t& header);
void WriteOptions(SessionOptions options, gradsync_session_options_t header,
                  gradsync_session_options_t* out);
void DestroyOptions(gradsync_session_options_t* options);

absl::StatusOr<LayoutSpec> ReadSpec(const gradsync_layout_spec_t* in);

// A spec that a program can register. The memory that the C struct points to lives as long as this
// object.
class SpecStorage {
 public:
  explicit SpecStorage(LayoutSpec spec);
  SpecStorage(const SpecStorage&) = delete;
  SpecStorage& operator=(const SpecStorage&) = delete;

  void Write(gradsync_layout_spec_t* out) const;

 private:
  const LayoutSpec spec_;
  std::vector<gradsync_parameter_t> parameters_;
  std::vector<gradsync_explicit_bucket_t> buckets_;
};

// INVALID_ARGUMENT MALFORMED: an item has no name.
absl::StatusOr<std::vector<StateItem>> ReadItems(const gradsync_state_item_t* items,
                                                 std::size_t count);
// A TrainerState that calls the functions of `in`.
absl::StatusOr<std::shared_ptr<TrainerState>> ReadReader(const gradsync_state_reader_t* in);

void WriteResult(StepResult result, gradsync_step_result_t header, gradsync_step_result_t* out);
void DestroyResult(gradsync_step_result_t* result);

void WriteStatistics(const SessionStatistics& statistics, gradsync_statistics_t* out);

}  // namespace gradsync::c_api

#endif  // CLIENT_SRC_C_STRUCTS_H_
