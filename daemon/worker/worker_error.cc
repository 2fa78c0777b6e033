#include "daemon/worker/worker_error.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error.h"

namespace gradsync::daemon {

worker::Error EncodeError(const absl::Status& status) {
  worker::Error error;
  error.set_code(static_cast<int>(status.code()));
  error.set_message(std::string(status.message()));
  const ErrorDetails details = DetailsOf(status);
  error.set_reason(details.reason);
  for (const auto& [key, value] : details.fields) {
    worker::Error::Field* const field = error.add_fields();
    field->set_key(key);
    field->set_value(value);
  }
  return error;
}

absl::Status DecodeError(const worker::Error& error) {
  // Another node's worker may send any number. An error is never OK.
  const bool known = error.code() > 0 && error.code() <= 16;
  const auto code =
      known ? static_cast<absl::StatusCode>(error.code()) : absl::StatusCode::kUnknown;
  if (error.reason().empty()) return absl::Status(code, error.message());
  ErrorDetails details;
  details.reason = error.reason();
  for (const worker::Error::Field& field : error.fields()) {
    details.fields.emplace_back(field.key(), field.value());
  }
  return MakeError(code, details, error.message());
}

}  // namespace gradsync::daemon
