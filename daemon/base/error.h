// Errors on which a trainer can act: an absl::Status with a reason (RANK_LOST) and fields (job,
// rank, channel, step, bucket). Inside the daemon they are a payload of the status; daemon/rpc
// translates them into google.rpc.ErrorInfo.

#ifndef DAEMON_BASE_ERROR_H_
#define DAEMON_BASE_ERROR_H_

#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/gradsync/error_reason.h"

namespace gradsync::daemon {

// A field of an error with its value, such as {field::kRank, 3}. If the value is empty, the error
// does not get the field.
struct ErrorField {
  ErrorField(FieldName field_name, const absl::AlphaNum& field_value)
      : name(field_name), value(field_value.Piece()) {}

  FieldName name;
  std::string value;
};

// The reason and the fields of an error. They are text, because another process may know reasons
// and fields that this one does not know.
struct ErrorDetails {
  // Returns the value of field `name`, or "".
  std::string Value(FieldName name) const;

  std::string reason;  // empty: MakeError() did not make the status
  std::vector<std::pair<std::string, std::string>> fields;
};

// Makes an error. Texts are cut at the first NUL.
absl::Status MakeError(absl::StatusCode code, Reason reason, absl::string_view message,
                       std::initializer_list<ErrorField> fields = {});

// Makes an error with the details of another one.
absl::Status MakeError(absl::StatusCode code, const ErrorDetails& details,
                       absl::string_view message);

// Returns text of another process as Protocol Buffers accepts it: at most `most` bytes of UTF-8.
// Each byte that is no UTF-8 becomes '?'. Cuts no character in two.
std::string ValidText(absl::string_view text, std::size_t most);

// Returns the details of an error; empty details if it has none.
ErrorDetails DetailsOf(const absl::Status& status);

}  // namespace gradsync::daemon

#endif  // DAEMON_BASE_ERROR_H_
