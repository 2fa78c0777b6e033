// Errors that a trainer can act on: an absl::Status with a reason ("RANK_LOST") and fields (job,
// rank, channel, step, bucket). They travel inside the daemon as a Status payload; daemon/rpc alone
// turns them into google.rpc.ErrorInfo.

#ifndef DAEMON_BASE_ERROR_H_
#define DAEMON_BASE_ERROR_H_

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace gradsync {

using ErrorField = std::pair<absl::string_view, std::string>;

// Keys and values must not contain NUL (values are cut there).
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       std::initializer_list<ErrorField> fields = {});

// The same, of fields that another process named.
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const std::vector<std::pair<std::string, std::string>>& fields);

struct ErrorDetails {
  std::string reason;  // empty: the status was not made by MakeError
  std::vector<std::pair<std::string, std::string>> fields;
};
ErrorDetails DetailsOf(const absl::Status& status);

}  // namespace gradsync

#endif  // DAEMON_BASE_ERROR_H_
